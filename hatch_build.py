"""Wheel hook: compile the CPU library where there is a C compiler, and never fail where there is none.

A wheel that carries the library is for one platform and any Python; without it, it is pure Python and the library is
compiled at first use. Editable installs always leave it to first use: the sources are still changing.
"""

import importlib.util
import sysconfig
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("src", "nibblas", "kernels")


class CPULibraryHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        cpu_library = self._load()
        compiler = cpu_library.find_compiler()
        if compiler is None:
            self.app.display_warning("nibblas: no C compiler; the CPU library will be compiled at first use")
            return
        self.folder = tempfile.TemporaryDirectory()
        made = Path(self.folder.name, cpu_library.PREBUILT.name)
        try:
            cpu_library.compile_to(made, compiler)
        except cpu_library.CompileError as error:
            self.app.display_warning(f"nibblas: the CPU library is left to first use: {error}")
            return
        build_data["force_include"][str(made)] = f"nibblas/kernels/{made.name}"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def _load(self):
        """cpu_library.py by its path: neither torch nor nibblas is installed here."""
        path = Path(self.root, KERNELS, "cpu_library.py")
        spec = importlib.util.spec_from_file_location("cpu_library", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
