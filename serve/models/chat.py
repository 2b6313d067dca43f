"""Chats to tokens: the template's control tokens are control tokens, the messages' are plain text.

Special-token strings in the messages are first covered with a filler of the same length. The rendered
shadow then has exactly the template's own control tokens, at the same characters as the real text; where
the filler shows, the stretch between two of them is tokenized again from the real text as plain text.
A chat without such strings is tokenized whole, as `apply_chat_template` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve.errors import BadRequest
from serve.models.spans import Pieces, bytes_per_token, encode_pieces
from serve.models.templates import Rendered, render_foreign, render_own

FILL, MARK = "\ue000", "\ue001"  # private-use characters that stand for a message's own
ANCHORS = ("\n", ".", ":")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
RESERVED = {
    "messages",
    "conversations",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
}
TAG = re.compile(r"(<[^<>\s]*>)")

Chat = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


@dataclass(frozen=True)
class EncodedChat:
    """A chat as ids. bytes_per_token sums to the bytes of `text`, the rendered chat, less its control tokens, which
    write nothing that anybody says and have 0 bytes.

    assistant_mask[i] is true on tokens of assistant content and on the token that ends such a turn.
    """

    ids: tuple[int, ...]
    bytes_per_token: tuple[int, ...]
    assistant_mask: tuple[bool, ...]
    text: str


def encode_chat(
    tokenizer: Any,
    messages: Chat,
    *,
    template: str | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> EncodedChat:
    """Render messages with a chat template (the tokenizer's own by default) and tokenize them; adds no BOS.

    continue_final_message: the rendering ends with the last message's content, nothing closes it.
    template_kwargs: further variables of the template.
    Raises BadRequest where there is no template, it refuses the messages, or it rewrites special-token
    strings inside them.
    """
    render = _Renderer(tokenizer, template, tools, template_kwargs or {})
    special = _special_pattern(tokenizer)
    chat = [dict(message) for message in messages]
    covered = [_map_message(message, lambda text: special.sub(_filler, text)) for message in chat]
    text = render(chat, prompt=add_generation_prompt)
    shadow = text if covered == chat else render(covered, prompt=add_generation_prompt)
    if len(shadow) != len(text) or any(a != b and b != FILL for a, b in zip(text, shadow, strict=True)):
        raise BadRequest(
            "the chat template rewrites special-token strings inside the messages: remove them from the content",
            param="messages",
        )
    whole = shadow
    if continue_final_message:
        text = _left_open(render, chat)
        shadow = shadow[: len(text)]
    pieces = _encode_mixed(tokenizer, text, shadow)
    spans = list(_assistant_spans(render, covered, whole, special, prompt=add_generation_prompt))
    mask = tuple(any(start < high and end > low for low, high in spans) for start, end in pieces.spans)
    return EncodedChat(pieces.ids, _sizes(tokenizer, text, pieces), mask, text)


class _Renderer:
    """Renders chats to text with one template."""

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        reserved = RESERVED.intersection(variables)
        if reserved:
            name = f"chat_template_kwargs.{min(reserved)}"
            raise BadRequest(f"'{name}' is not supported by this server", param=name)
        self._variables = {**tokenizer.special_tokens_map, **variables}
        self._render_text = render_own if template is None else render_foreign
        self._tools = [dict(tool) for tool in tools] if tools else None
        try:
            self.template: str = tokenizer.get_chat_template(template, tools=self._tools)
        except ValueError as error:
            raise BadRequest(
                "the model has no chat template: give one, or use plain text", param="chat_template"
            ) from error

    def __call__(self, chat: Chat, *, prompt: bool = False) -> str:
        return self._render(chat, prompt=prompt, spans=False).text

    def generation_spans(self, chat: Chat, *, prompt: bool) -> list[Span]:
        """Characters inside the template's {% generation %} blocks."""
        return self._render(chat, prompt=prompt, spans=True).spans

    def _render(self, chat: Chat, *, prompt: bool, spans: bool) -> Rendered:
        return self._render_text(
            {
                "chat": list(chat),
                "template": self.template,
                "tools": self._tools,
                "variables": self._variables,
                "prompt": prompt,
                "spans": spans,
            }
        )


def _left_open(render: _Renderer, chat: Chat) -> str:
    """The rendering up to the end of the last message's content, found by a mark put behind it.

    Where the template trims the content, its trailing whitespace is gone here too (as transformers does).
    """
    marked = [*chat[:-1], {**chat[-1], "content": f"{chat[-1]['content']}{MARK} "}]
    text = render(marked)
    at = text.rfind(MARK)
    upto = text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()
    if at < 0 or not render(chat).startswith(upto):
        raise BadRequest("the chat template does not show the final message as it is", param="continue_final_message")
    return upto


def _encode_mixed(tokenizer: Any, text: str, shadow: str) -> Pieces:
    """Tokenize the shadow whole; between its control tokens, filled stretches anew from the text, plain."""
    whole = encode_pieces(tokenizer, shadow, plain=False)
    if shadow == text:
        return whole
    ids: list[int] = []
    spans: list[Span] = []
    at, first = 0, 0  # the open stretch: from character `at`, from token `first`
    for control in [*_controls(tokenizer, shadow, whole), None]:
        upto = len(text) if control is None else whole.spans[control][0]
        if FILL in shadow[at:upto]:
            before = whole.ids[first - 1] if first else None
            stretch = _encode_stretch(tokenizer, text[at:upto], before=before)
            ids += stretch.ids
            spans += [(start + at, end + at) for start, end in stretch.spans]
        else:
            ids += whole.ids[first:control]
            spans += whole.spans[first:control]
        if control is not None:
            ids.append(whole.ids[control])
            spans.append(whole.spans[control])
            at, first = whole.spans[control][1], control + 1
    return Pieces(tuple(ids), tuple(spans))


def _controls(tokenizer: Any, text: str, pieces: Pieces) -> list[int]:
    """Indices of the control tokens that the text writes out. An unknown character is not a written <unk>."""
    special = {index: str(token.content) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    written = [text[start:end].strip() for start, end in pieces.spans]
    return [i for i, index in enumerate(pieces.ids) if index in special and written[i] == special[index].strip()]


def _sizes(tokenizer: Any, text: str, pieces: Pieces) -> tuple[int, ...]:
    """UTF-8 bytes that each token adds to what is said: 0 for control tokens."""
    controls = frozenset(_controls(tokenizer, text, pieces))
    return tuple(0 if i in controls else n for i, n in enumerate(bytes_per_token(text, pieces.spans)))


def _encode_stretch(tokenizer: Any, text: str, *, before: int | None) -> Pieces:
    """Plain tokens of a stretch as they read after the control token `before` (None: at the text's start).

    Tokenizers that mark the start of a text (a first "▁") would mark the start of a stretch too; there an
    anchor that stays a token of its own is put first and taken off again. Both ways are checked on a probe.
    """
    if before is None:
        return encode_pieces(tokenizer, text, plain=True)
    control = tokenizer.convert_ids_to_tokens(before)
    expected = encode_pieces(tokenizer, f"{control}ab c", plain=False).ids[1:]
    for anchor in ("", *ANCHORS):
        probe = _after_anchor(tokenizer, anchor, "ab c")
        stretch = _after_anchor(tokenizer, anchor, text)
        if probe is not None and stretch is not None and probe.ids == expected:
            return stretch
    raise BadRequest("this tokenizer cannot read special-token strings inside messages as text", param="messages")


def _after_anchor(tokenizer: Any, anchor: str, text: str) -> Pieces | None:
    """Plain tokens of `text` after `anchor`; None where a token holds characters of both."""
    pieces = encode_pieces(tokenizer, anchor + text, plain=True)
    width = len(anchor)
    kept = next((i for i, (_, end) in enumerate(pieces.spans) if end > width), len(pieces.ids)) if width else 0
    spans = pieces.spans[kept:]
    if any(start < width for start, _ in spans):
        return None
    return Pieces(pieces.ids[kept:], tuple((start - width, end - width) for start, end in spans))


def _assistant_spans(
    render: _Renderer, chat: Chat, shadow: str, special: re.Pattern[str], *, prompt: bool
) -> Iterator[Span]:
    """[start, end) in characters of what the assistant said, with the control token that ends each turn."""
    if GENERATION.search(render.template):
        yield from render.generation_spans(chat, prompt=prompt)
        return
    for turn, message in enumerate(chat):
        if message.get("role") == "assistant":
            span = _changed_span(render, chat, turn, shadow, prompt=prompt) or _prefix_span(render, chat, turn, shadow)
            if span is not None:
                yield span[0], _end_of_turn(render, chat, turn, shadow, special, end=span[1])


def _changed_span(render: _Renderer, chat: Chat, turn: int, shadow: str, *, prompt: bool) -> Span | None:
    """Where the rendering changes when the message's words do (its `<tags>` and whitespace stay).

    None where the template's layout depends on the words, or where there are none.
    """
    marked = list(chat)
    marked[turn] = _map_message(chat[turn], _mark)
    other = render(marked, prompt=prompt)
    if len(other) != len(shadow):
        return None
    changed = [i for i, (a, b) in enumerate(zip(shadow, other, strict=True)) if a != b]
    if not changed:
        return None
    start, end = changed[0], changed[-1] + 1
    content = chat[turn].get("content")
    if isinstance(content, str) and (marks := [i for i, c in enumerate(_mark(content)) if c == MARK]):
        lead, tail = content[: marks[0]], content[marks[-1] + 1 :]
        start -= len(lead) if shadow[:start].endswith(lead) else 0
        end += len(tail) if shadow[end:].startswith(tail) else 0
    return start, end


def _prefix_span(render: _Renderer, chat: Chat, turn: int, shadow: str) -> Span | None:
    """What the turn adds to the rendering of the turns before it and the prompt for it; None for nothing.

    Raises BadRequest where the shorter renderings are not prefixes of the whole.
    """
    before, after = render(chat[:turn], prompt=True), render(chat[: turn + 1])
    if not (after.startswith(before) and shadow.startswith(after)):
        raise BadRequest(
            "the assistant's words cannot be found in the rendered chat: "
            "give a template that marks them with {% generation %}",
            param="chat_template",
        )
    end = len(before) + len(after[len(before) :].rstrip())
    return (len(before), end) if end > len(before) else None


def _end_of_turn(render: _Renderer, chat: Chat, turn: int, shadow: str, special: re.Pattern[str], *, end: int) -> int:
    """The end of the control token that closes the turn; `end` where the template has none there.

    Only whitespace may lie between, and it must belong to this turn: the next one's first token does not.
    """
    control = special.search(shadow, end)
    if control is None or shadow[end : control.start()].strip():
        return end
    upto = render(chat[: turn + 1])
    if shadow.startswith(upto) and control.end() > len(upto):
        return end
    return control.end()


def _special_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Matches a special token's text, the longest first; never matches where there is none."""
    texts = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special}
    longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _map_message(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The message with every text in it changed, but for roles and part types."""
    return {key: value if key == "role" else _map_value(value, change) for key, value in message.items()}


def _map_value(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: item if key == "type" else _map_value(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_value(item, change) for item in value]
    return value


def _filler(match: re.Match[str]) -> str:
    return FILL * len(match[0])


def _mark(text: str) -> str:
    return "".join(part if TAG.fullmatch(part) else re.sub(r"\S", MARK, part) for part in TAG.split(text))
