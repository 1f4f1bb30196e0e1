"""Names in addresses."""

import re


def device_slug(name: str) -> str:
    """ "NVIDIA B200" -> "nvidia-b200"; empty where a name has no letter and no digit, so that it is nobody's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
