"""Names in addresses."""

import re

from nibblas.index.documents import Ref
from nibblas.index.rule import techniques


def device_slug(name: str) -> str:
    """ "NVIDIA B200" -> "nvidia-b200"; empty where a name has no letter and no digit, so that it is nobody's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def technique_ref(slug: str) -> Ref:
    """A technique by the name that the rules give it."""
    known = techniques().get(slug)
    return Ref(slug, known.name if known else slug)
