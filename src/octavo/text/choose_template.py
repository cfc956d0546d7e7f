"""Which chat template a model is served with."""

from __future__ import annotations

import logging
from pathlib import Path

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, ModelFileError
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from octavo.weights.messages import plain

logger = logging.getLogger(__name__)


def choose_template(wish: EngineConfig, tokenizer: Tokenizer) -> tuple[ChatTemplate | None, str]:
    """The user's template, else the model's own, and which one it is.

    None for a base model, which has none, and for a model whose own does not compile: its completions are as good as
    any. A broken template that the user asked for is a ConfigError.
    """
    source, which = tokenizer.chat_template, "the model's own"
    if wish.chat_template is not None:
        which = wish.chat_template
        try:
            source = Path(which).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat template {which}: {error}") from error
    if source is None:
        return None, "missing"
    try:
        return ChatTemplate(source, tokenizer, allow_special_in_content=wish.allow_special_in_content), which
    except ModelFileError as error:
        if wish.chat_template is not None:
            raise ConfigError(f"chat template {which}: {error}") from error
        reason = plain(str(error))
        logger.warning("%s: chats will be refused, completions served; or give --chat-template", reason)
        return None, f"broken ({reason})"
