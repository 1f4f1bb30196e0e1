"""The fields of a record as a table, made from its JSON Schema; this module as a program writes it to docs/arena.md."""

from collections.abc import Iterator
from typing import Any

from nibblas.arena.record import schema
from nibblas.generated import Part

PART = Part("docs/arena.md", "record", "nibblas.arena.fields")


def fields_table() -> str:
    """Every field in Markdown, with its type and what it means; those that may be missing in italics."""
    lines = ["| field | type | |", "|---|---|---|"]
    for path, kind, text, is_required in _fields("", schema(), {}):
        name = f"`{path}`" if is_required else f"*`{path}`*"
        lines.append(f"| {name} | {kind} | {text} |")
    return "\n".join(lines)


def _fields(prefix: str, part: dict[str, Any], told: dict[str, str]) -> Iterator[tuple[str, str, str, bool]]:
    """Path, type, description and whether it is always there; `told` has the path of each definition met so far."""
    for name, field in part["properties"].items():
        inner, kind, path, reference = _resolved(field, f"{prefix}{name}")
        known = told.get(reference)
        text = field.get("description", inner.get("description", ""))
        yield f"{prefix}{name}", f"{kind}, as `{known}`" if known else kind, text, name in part["required"]
        if "properties" in inner and not known:
            told |= {reference: path} if reference else {}
            yield from _fields(f"{path}.", inner, told)


def _resolved(field: dict[str, Any], path: str) -> tuple[dict[str, Any], str, str, str]:
    """The schema behind references, lists and null; its type in words; the path of its parts; the last reference."""
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[1]
        inner, kind, path, _ = _resolved(schema()["$defs"][name], path)
        return inner, kind, path, name
    if "anyOf" in field:
        inner, kind, path, reference = _resolved(field["anyOf"][0], path)
        return inner, f"{kind} or null", path, reference
    if "enum" in field:
        return field, ", ".join(field["enum"]), path, ""
    if "const" in field:
        return field, str(field["const"]), path, ""
    if field["type"] == "array":
        inner, kind, path, reference = _resolved(field["items"], f"{path}[]")
        return inner, f"list of {kind}", path, reference
    if "additionalProperties" in field and "properties" not in field:
        return field, f"map to {_resolved(field['additionalProperties'], path)[1]}", path, ""
    kinds = field["type"] if isinstance(field["type"], list) else [field["type"]]
    return field, " or ".join(kinds), path, ""


if __name__ == "__main__":
    PART.write(fields_table())
