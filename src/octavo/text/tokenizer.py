"""Text to token ids and back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from octavo.core.errors import InvalidRequest, PromptTooLong
from octavo.core.steps import Steps, finish
from octavo.text.detokenizer import Detokenizer
from octavo.text.pre_tokenizers import PIECE_CHARS
from octavo.text.tokenizer_folder import read_folder_tokenizer
from octavo.text.tokenizer_gguf import read_gguf_tokenizer
from octavo.text.tokenizer_parts import TokenizerParts
from octavo.text.vocabulary import CONTROL_KINDS, SpecialTokenMatcher, TokenKind, not_normal

logger = logging.getLogger(__name__)

_CHECKED_CHARS = 1 << 16  # looked at in one call


class Tokenizer:
    """A model's tokenizer. Immutable; every method is safe to call from several threads at once.

    Text reaches the merging algorithm with its special tokens already cut out, and that algorithm does not know the
    control tokens at all. So plain text can never become one, whatever the vocabulary says.

    vocab_size:        number of tokens; a model's embedding may have more rows, which stand for nothing
    bos_token_id:      begins a text; None if the model has none
    eos_token_id:      the file's own end of text; None if it names none
    eos_token_ids:     all that end a turn or a text
    add_bos:           whether ``encode`` begins with ``bos_token_id`` unless told otherwise
    adds_space_prefix: whether ``encode`` puts a space before the text, as SentencePiece does
    chat_template:     the model's own Jinja source
    control_token_ids: what ``is_control`` says yes to
    control_tokens, user_defined_tokens: the two kinds of special tokens; ``special_tokens`` finds both in text
    bytes_by_id, visible_bytes_by_id: the table behind ``token_bytes``, and the same with control tokens empty
    """

    def __init__(self, parts: TokenizerParts) -> None:
        vocabulary = parts.vocabulary
        self.vocab_size = len(vocabulary.texts)
        self.bos_token_id = parts.bos_token_id
        self.eos_token_id = parts.eos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.add_bos = parts.add_bos
        self.adds_space_prefix = parts.adds_space_prefix
        self.chat_template = parts.chat_template
        kinds = vocabulary.kinds
        self.control_token_ids = frozenset(i for i in not_normal(kinds) if kinds[i] in CONTROL_KINDS)
        self.control_tokens = [token for token in parts.special if kinds[token.token_id] in CONTROL_KINDS]
        self.user_defined_tokens = [t for t in parts.special if kinds[t.token_id] == TokenKind.USER_DEFINED]
        self.special_tokens = SpecialTokenMatcher(parts.special)
        self._user_defined = SpecialTokenMatcher(self.user_defined_tokens)
        self._texts = vocabulary.texts
        self.bytes_by_id = vocabulary.token_bytes
        self.visible_bytes_by_id = list(vocabulary.token_bytes)
        for token_id in self.control_token_ids:
            self.visible_bytes_by_id[token_id] = b""
        self._encoder = parts.encoder
        self._has_told_of_bos = False
        # special tokens that swallow the white space beside them stand for any amount of it
        swallows = any(token.lstrip or token.rstrip for token in parts.special)
        self._max_token_bytes = None if swallows else parts.max_token_bytes

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """The tokenizer described by a GGUF file's metadata. Raises ``ModelFileError``."""
        return cls(read_gguf_tokenizer(metadata))

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face model folder. Raises ``ModelFileError``."""
        return cls(read_folder_tokenizer(path))

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Ids of ``text``.

        parse_special: control tokens written out in ``text`` become that token; otherwise they are plain text.
                       User-defined tokens always count.
        add_bos:       begin with ``bos_token_id``, unless the text does; None means as the model does

        Raises ``InvalidRequest`` for half surrogate pairs, which are no text.
        """
        return finish(self.encode_steps(text, parse_special=parse_special, add_bos=add_bos))

    def encode_steps(
        self, text: str, *, parse_special: bool = False, add_bos: bool | None = None, max_tokens: int | None = None
    ) -> Steps[list[int]]:
        """``encode`` in pieces. Raises ``PromptTooLong`` as soon as there must be more than ``max_tokens`` ids."""
        yield from self.check_length_steps(text, max_tokens)
        if add_bos is None:
            add_bos = self.add_bos
        ids = yield from self.encode_text_steps(
            text, self.special_tokens if parse_special else self._user_defined, max_tokens=max_tokens
        )
        bos = self.bos_token_id
        if not add_bos or bos is None:
            return ids
        if bos in self.control_token_ids and ids[:1] == [bos]:  # written out by whoever renders templates himself
            self._tell_of_bos(self._texts[bos])
            return ids
        return [bos, *ids]

    def _tell_of_bos(self, name: str) -> None:
        """Once: other engines put a second BOS in front."""
        if not self._has_told_of_bos:
            self._has_told_of_bos = True
            logger.warning("a prompt begins with %r, which is added to every text: it was not doubled", name)

    def check_length_steps(self, text: str, max_tokens: int | None, *, disguised: bool = False) -> Steps[None]:
        """Raise ``InvalidRequest`` unless ``text`` is text, ``PromptTooLong`` if its length alone says that it is.

        disguised: characters may stand for others that take fewer bytes, so each counts for one
        """
        most = self._max_token_bytes
        limit = None if max_tokens is None or most is None else max_tokens * most
        _check_bytes(len(text), limit, most, max_tokens)
        num_bytes = 0
        for start in range(0, len(text), _CHECKED_CHARS):
            num_bytes += check_text(text, start, start + _CHECKED_CHARS)
            if not disguised:
                _check_bytes(num_bytes, limit, most, max_tokens)
            yield

    def encode_text_steps(
        self,
        text: str,
        special: SpecialTokenMatcher,
        *,
        undo: Mapping[str, str] | None = None,
        max_tokens: int | None = None,
    ) -> Steps[list[int]]:
        """Ids of ``text``, cut at what ``special`` finds.

        undo: what to write in the plain pieces instead of single characters
        """
        pieces: list[str | int] = []
        for _ in special.split_steps(text, pieces):
            check_num_tokens(len(pieces) // 2, max_tokens)  # every other piece is a special token at least
            yield
        return (yield from self.encode_pieces_steps(pieces, undo=undo, max_tokens=max_tokens))

    def encode_pieces_steps(
        self, pieces: Sequence[str | int], *, undo: Mapping[str, str] | None = None, max_tokens: int | None = None
    ) -> Steps[list[int]]:
        """Ids of plain texts with token ids between them; nothing is looked for in the texts and no BOS is added."""
        ids: list[int] = []
        few: list[str | int] = []  # pieces that make one call
        num_chars = 0
        at_start = True
        for piece in pieces:
            if isinstance(piece, int) or len(piece) <= PIECE_CHARS:
                few.append(piece)
                num_chars += 32 + (len(piece) if isinstance(piece, str) else 0)
                if num_chars < PIECE_CHARS:
                    continue
            ids += yield from self._encode_few(few, undo, at_start=at_start)
            at_start = at_start and not few
            few, num_chars = [], 0
            check_num_tokens(len(ids), max_tokens)
            if isinstance(piece, str) and len(piece) > PIECE_CHARS:
                start = 0
                while start < len(piece):
                    stop = self._encoder.cut(piece, start, PIECE_CHARS)
                    self._check_run(stop - start, max_tokens)
                    part = _replace_all(piece[start:stop], undo)
                    (more,) = yield from self._encoder.encode_steps([part], at_start=at_start, goes_on=start > 0)
                    ids += more
                    at_start, start = False, stop
                    check_num_tokens(len(ids), max_tokens)
        ids += yield from self._encode_few(few, undo, at_start=at_start)
        check_num_tokens(len(ids), max_tokens)
        return ids

    def _encode_few(
        self, pieces: Sequence[str | int], undo: Mapping[str, str] | None, *, at_start: bool
    ) -> Steps[list[int]]:
        texts = [_replace_all(piece, undo) for piece in pieces if isinstance(piece, str)]
        first_is_text = at_start and bool(pieces) and isinstance(pieces[0], str)
        encoded = iter((yield from self._encoder.encode_steps(texts, at_start=first_is_text)) if texts else ())
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += next(encoded)
        yield
        return ids

    def _check_run(self, num_chars: int, max_tokens: int | None) -> None:
        """Raise ``InvalidRequest`` if a server's text has a longer run without a place to cut than it takes."""
        limit = self._encoder.max_run
        if max_tokens is not None and limit is not None and num_chars > limit + PIECE_CHARS:
            raise InvalidRequest(
                f"the text has {num_chars} characters without a space or a letter beside punctuation; at most {limit} "
                "are tokenised at once",
                param="prompt",
            )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of text that a token stands for, often part of a character; a control token's are its name.

        Empty for ids from ``vocab_size`` up, which some models' embeddings are padded with.
        """
        if token_id >= self.vocab_size:
            return b""
        assert token_id >= 0, token_id
        return self.bytes_by_id[token_id]

    def token_text(self, token_id: int) -> str:
        """The token as the model's file spells it."""
        return self._texts[token_id]

    def is_control(self, token_id: int) -> bool:
        """Whether the token begins or ends turns and texts rather than standing for text."""
        return token_id in self.control_token_ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence: ``decode(encode(text)) == text``. U+FFFD stands for what is no character."""
        detokenizer = Detokenizer(self, skip_special=skip_special, drop_space_prefix=True)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def _replace_all(text: str, undo: Mapping[str, str] | None) -> str:
    for written, meant in (undo or {}).items():
        text = text.replace(written, meant)
    return text


def check_text(text: str, start: int = 0, stop: int | None = None) -> int:
    """The length of ``text[start:stop]`` in UTF-8. Raises ``InvalidRequest`` unless it can be written so."""
    try:
        return len((text if stop is None else text[start:stop]).encode())
    except UnicodeEncodeError as error:
        at = start + error.start
        raise InvalidRequest(
            f"character {at} of the text is U+{ord(text[at]):04X}, half of a surrogate pair; send whole characters"
        ) from None


def check_num_tokens(num_tokens: int, max_tokens: int | None) -> None:
    """Raise ``PromptTooLong`` if a prompt of at least ``num_tokens`` cannot fit."""
    if max_tokens is not None and num_tokens > max_tokens:
        raise PromptTooLong(
            f"This model's maximum context length is {max_tokens} tokens, but the prompt has at least {num_tokens}; "
            "shorten it or raise --max-model-len",
            param="prompt",
        )


def _check_bytes(num_bytes: int, limit: int | None, most: int | None, max_tokens: int | None) -> None:
    if limit is not None and most is not None and num_bytes > limit:
        check_num_tokens(-(-num_bytes // most), max_tokens)
