"""The content of a message: text, or parts of text and media."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from extproc.prompt import canonical as c

#: A string, or parts; a part is a string, or an object with a ``type``.
Content = str | list[str | dict[str, Any]] | None

#: Type of a part that is text for the engine → the key that holds it.
_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}

#: Key that holds a part's medium → what the engine makes of it.
_MODALITIES = {
    "image_url": "image",
    "image_embeds": "image_embeds",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio_embeds",
    "video_url": "video",
    "data": "prompt_embeds",
}

_MAX_PARTS = 2**16


class TooManyPartsError(Exception):
    """A message of more parts than any real one; the work for them would stall other requests."""


def write_content(
    text: c.CanonicalText, content: Content, joined: bool, media_options: Sequence[object]
) -> None:
    """Write a message's content.

    ``joined``: vLLM's content format "string": text parts are joined by newlines, and the placeholders of
    media go before the text wherever they stood; otherwise the template sees each part in its place.
    """
    if content is None:
        return
    if isinstance(content, str):
        if content or not joined:
            text.put(c.TEXT, content)
        return
    if len(content) > _MAX_PARTS:
        raise TooManyPartsError
    texts: list[str] = []
    for part in content:
        string = part if isinstance(part, str) else _text_of(part)
        if string is not None:
            if joined:
                texts.append(string)
            else:
                text.put(c.TEXT, string)
        elif isinstance(part, dict):
            _write_other(text, part, media_options)
    if any(texts) or len(texts) > 1:
        text.put(c.TEXT, "\n".join(texts))


def is_text(content: Content) -> bool:
    """Return whether a content holds nothing but text."""
    if content is None or isinstance(content, str):
        return True
    return all(isinstance(part, str) or _text_of(part) is not None for part in content)


def _text_of(part: dict[str, Any]) -> str | None:
    """Return a part's text, None for another kind of part."""
    kind = part.get("type")
    key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    string = part.get(key) if key else None
    return string if isinstance(string, str) else None


def _write_other(text: c.CanonicalText, part: dict[str, Any], media_options: Sequence[object]) -> None:
    """Write a part that isn't text: a reference by name, a medium by its identity.

    A medium's identity is the client's ``uuid`` if there is one (vLLM then looks at nothing else), or its
    URL or data. It is hashed: megabytes of base64 say nothing about the number of tokens.
    """
    kind = part.get("type")
    if isinstance(kind, str) and kind in _TEXT_KEYS:
        return  # without text: vLLM skips it
    if kind == "tool_reference":
        text.put(c.REFERENCE, str(part.get("name")))
        return
    key = next((key for key in _MODALITIES if key in part), None)
    medium = part if key is None else part[key]
    if isinstance(medium, dict) and "url" in medium:
        medium = medium["url"]
    modality = _MODALITIES.get(key or "", "part")
    uuid = part.get("uuid")
    identity = c.digest(modality, medium if uuid is None else ["uuid", str(uuid)], media_options)
    text.put(c.MEDIA, identity)
