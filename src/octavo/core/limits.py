"""The price list: how much of each thing a client may send, stated once.

A bound here is a bound on work and memory, and it is checked before the work is done.
"""

from __future__ import annotations

# the request as bytes
MAX_BODY_BYTES = 8 << 20
BODY_TIMEOUT_S = 60.0
# choices
MAX_N = 16
MAX_PROMPTS = 256
MAX_CHOICES = 1024  # prompts x n
# messages
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message's content
# draws
MAX_LOGPROBS = 20
MAX_TOKEN_ID_LIST = 4096  # logit_bias, allowed_token_ids, stop_token_ids, dry_sequence_breaker_ids
MAX_BAD_WORDS = 256  # token sequences
MAX_BAD_WORD_TOKENS = 64
MAX_WORD_CHARS = 256  # of a bad word or a sequence breaker
MAX_SEQUENCE_BREAKERS = 64
# stopping
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
# scheduling
MAX_CACHE_SALT_CHARS = 256
