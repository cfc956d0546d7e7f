"""Text to token ids and back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from octavo.core.errors import InvalidRequest
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer_folder import read_folder_tokenizer
from octavo.text.tokenizer_gguf import read_gguf_tokenizer
from octavo.text.tokenizer_parts import TokenizerParts
from octavo.text.vocabulary import CONTROL_KINDS, SpecialTokenMatcher, TokenKind, not_normal

logger = logging.getLogger(__name__)


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
        check_text(text)
        if add_bos is None:
            add_bos = self.add_bos
        matcher = self.special_tokens if parse_special else self._user_defined
        ids = self.encode_pieces(matcher.split(text))
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

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """Ids of plain texts with token ids between them; nothing is looked for in the texts and no BOS is added."""
        texts = [piece for piece in pieces if isinstance(piece, str)]
        encoded = iter(self._encoder.encode_pieces(texts, at_start=isinstance(next(iter(pieces), None), str)))
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(next(encoded))
        return ids

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


def check_text(text: str) -> None:
    """Raise ``InvalidRequest`` unless ``text`` can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidRequest(
            f"character {error.start} of the text is U+{code:04X}, half of a surrogate pair; send whole characters"
        ) from None
