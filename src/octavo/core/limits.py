"""The price list: how much of each thing a client may send, stated once.

A bound here is a bound on work and memory, and it is checked before the work is done.
"""

from __future__ import annotations

# connections
MAX_CONNECTIONS = 4096  # where --max-connections says nothing; idle 6 kB each, 22 kB with headers half sent
RESERVED_DESCRIPTORS = 64  # of RLIMIT_NOFILE, for all that is no connection
MAX_HEADER_BYTES = 16 << 10
HEADER_TIMEOUT_S = 15.0  # from accepting, or from a request's first byte, to the end of its headers
READ_BYTES = 4096  # that one callback takes from a socket; 1-byte chunks cost 1 us per byte of it
MAX_PIPELINED_BYTES = 64 << 10  # of further requests, while one is answered
# the request as bytes
MAX_BODY_BYTES = 8 << 20
MAX_BODY_PIECES = 1024  # chunks, or reads where it is not chunked, of a body; 5 us each ...
MIN_PIECE_BYTES = 256  # ... and so many more as it has bytes by this
BODY_TIMEOUT_S = 60.0
MAX_JSON_DEPTH = 256
MAX_JSON_NUMBERS = 1 << 20  # whole numbers of a body: as many token ids as 8 MB can hold, mostly; 36 bytes each
MAX_JSON_VALUES = 1 << 16  # of a body, besides: objects, lists, strings, keys, other numbers; some 100 bytes each
MAX_NUMBER_CHARS = 4300  # of one number: the interpreter's own limit for whole numbers
MAX_FIELDS = 256  # of the request object, of a message, of template arguments
MAX_FIELD_CHARS = 4096  # of a string in any field but prompt and messages, before what that field says itself
MAX_RECEIVING_BYTES = 256 << 20  # of all bodies that have not arrived to their end
# slow readers
WRITE_TIMEOUT_S = 30.0  # without the client's socket taking anything while there is something to send
MAX_UNSENT_BYTES = 256 << 20  # that all clients' sockets together have not taken
MAX_UNREAD_BYTES = 16 << 20  # of outputs of one prompt that its reader has not come for
MAX_UNREAD_TOTAL_BYTES = 256 << 20  # of all prompts
# work on text, in pieces on the text workers; one that waits keeps its bytes
MAX_TEXT_JOBS = 4096
MAX_TEXT_JOBS_PER_CLIENT = 1024  # all callers without a key are one client
MAX_TEXT_JOB_BYTES = 128 << 20
MAX_TEXT_JOB_BYTES_PER_CLIENT = 32 << 20
MAX_TEXT_CHARS = 1 << 21  # of one string of a body
MAX_CHAT_CHARS = (
    1 << 20
)  # of a chat's messages together: templates copy them whole, 4 bytes each if one needs that many
MAX_RUN_CHARS = 1 << 16  # without a place to cut text at before byte-pair encoding: 15 to 90 ms in one call
MAX_MERGE_CHARS = 1 << 18  # the same for SentencePiece: of a word, or of all text if tokens cross words; 200 bytes each
# choices
MAX_N = 16
MAX_PROMPTS = 256
MAX_CHOICES = 1024  # prompts x n
# messages
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message's content
# draws
MAX_LOGPROBS = 20
MAX_TOKEN_ID_LIST = 4096  # logit_bias, allowed_token_ids, stop_token_ids
MAX_BAD_WORDS = 256  # token sequences
MAX_BAD_WORD_TOKENS = 64
MAX_WORD_CHARS = 256  # of a bad word or a sequence breaker
MAX_SEQUENCE_BREAKERS = 64
# stopping
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
# scheduling
MAX_CACHE_SALT_CHARS = 256
