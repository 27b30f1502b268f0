"""What pytest-html puts into its page as markup although it comes from anywhere, escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from pytest_gpufleet.report import wording

# Of an address, as a browser reads it: without white space and control characters.
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*(?=:)", re.IGNORECASE)
_IGNORED = re.compile(r"[\x00-\x20]+")
_HARMLESS = ("http", "https", "mailto", "")
_LINKS = ("json", "text", "url")  # the extras that pytest-html makes a link of; the others it keeps as data


def text(value: object) -> str:
    return escape(wording.clean(str(value)))


def metadata(given: Mapping[str, Any]) -> dict[str, Any]:
    """What pytest-metadata found in the environment of a CI server, for pytest-html's table."""
    return {
        wording.clean(str(name)): {text(key): text(each) for key, each in value.items()}
        if isinstance(value, Mapping)
        else text(value)
        for name, value in given.items()
    }


def extras(given: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What tests attached to their reports. Markup is shown as text, and an address that is none is left out."""
    return [shown for each in given if (shown := _extra(each)) is not None]


def _extra(extra: Mapping[str, Any]) -> dict[str, Any] | None:
    kind, content = extra.get("format_type"), extra.get("content")
    if kind == "html":
        return {**extra, "content": text(content)}
    if kind in ("url", "image", "video") and _scheme(str(content)) not in _HARMLESS:
        return None
    if kind not in _LINKS:
        return dict(extra)
    shown = {key: text(value) if isinstance(value, str) else value for key, value in extra.items()}
    return shown if kind == "url" else {**shown, "content": content}  # which pytest-html encodes


def _scheme(address: str) -> str:
    found = _SCHEME.match(_IGNORED.sub("", address))
    return found[0].lower() if found else ""
