"""GGUF files that lie: always a ``ModelFileError``, quickly, in little memory, and never anything else."""

import os
import random
import re
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.core.errors import ModelFileError
from octavo.model.gguf_model import GGUFFile, GGUFWeights
from octavo.weights.dequantise import GROUP_LAYOUT, Encoding
from weights.gguf_writer import pack_header, pack_key, pack_string, pack_tensor_info, random_llama

MAX_S, MAX_BYTES = 1.0, 200 << 20
U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
HUGE = 2**64 - 1


def refusal(path: Path, data: bytes) -> str:
    """The message with which a file is refused, after checking what the refusal cost."""
    path.write_bytes(data)
    started = time.process_time()
    with pytest.raises(ModelFileError) as caught:
        GGUFFile(path)
    assert time.process_time() - started < MAX_S
    tracemalloc.start()  # by itself: it makes everything four times slower
    try:
        with pytest.raises(ModelFileError):
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    return str(caught.value)


def one_key(kind: int, payload: bytes) -> bytes:
    return pack_header(0, 1) + pack_string("k") + U32(kind) + payload + bytes(64)


def one_tensor(info: bytes, data: bytes = bytes(4096), *keys: bytes) -> bytes:
    head = pack_header(1, len(keys)) + b"".join(keys) + info
    return head + bytes(-len(head) % 32) + data


def two_tensors(first: bytes, second: bytes) -> bytes:
    head = pack_header(2, 0) + first + second
    return head + bytes(-len(head) % 32) + bytes(4096)


def nested(depth: int) -> bytes:
    return b"".join(U32(9) + U64(1) for _ in range(depth)) + U32(0) + U64(0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"GG", "needs 4 bytes|not a GGUF file"),
        (b"\x80\x04\x95" + bytes(64), "not a GGUF file: it starts with"),
        (b"PK\x03\x04" + bytes(64), "not a GGUF file"),
        (pack_header(0, 0, version=1), "version 1 is not supported; versions 2 and 3 are"),
        (pack_header(0, 0, version=99), "version 99 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (pack_header(HUGE, 0) + bytes(64), "18446744073709551615 tensors are announced"),
        (pack_header(0, HUGE) + bytes(64), "18446744073709551615 metadata keys are announced"),
        (pack_header(2**31, 0) + bytes(64), "2147483648 tensors are announced"),
        (pack_header(0, 1) + U64(HUGE) + bytes(64), "a metadata key is a string of 18446744073709551615 bytes"),
        (pack_header(0, 1) + U64(1000) + bytes(64), "a metadata key needs 1000 bytes at offset 32"),
        (pack_header(0, 1) + pack_string(b"\xff\xfe") + U32(0) + bytes(64), "a metadata key is not valid UTF-8"),
        (one_key(8, pack_string(b"ab\xc3")), "k is not valid UTF-8 at offset"),
        (one_key(13, b""), "has the unknown type 13"),
        (one_key(7, b"\x02"), "is a truth value but holds 2"),
        (one_key(9, U32(8) + U64(2**40)), "past 1000000 strings"),
        (one_key(9, U32(4) + U64(HUGE)), "past 1000000 numbers"),
        (one_key(9, U32(8) + U64(900_000)), "needs 7200000 bytes"),
        (one_key(9, U32(4) + U64(900_000)), "needs 3600000 bytes"),
        (one_key(9, U32(9) + U64(HUGE)), "holds 18446744073709551615 arrays; at most 65536"),
        (one_key(9, U32(9) + U64(60_000)), "k needs"),
        (one_key(9, U32(99) + U64(3)), "elements of the unknown type 99"),
        (one_key(9, U32(7) + U64(3) + b"\0\1\7"), "truth values holds 7"),
        (one_key(9, U32(8) + U64(2) + pack_string("a") + U64(HUGE)), "string 1 of k is a string of"),
        (one_key(9, U32(8) + U64(2) + pack_string("a") + U64(900)), "string 1 of k needs 900 bytes"),
        (one_key(9, U32(8) + U64(2) + pack_string("a") + pack_string(b"\xe2\x82")), "string 1 of k is not valid UTF-8"),
        (one_key(9, nested(4)), "nested deeper than 4"),
        (one_key(9, nested(100_000)), "nested deeper than 4"),
        (pack_header(0, 2) + pack_key("k", 1) * 2, "metadata key 'k' appears twice"),
        (pack_header(0, 1) + pack_key("general.alignment", 0), "alignment is 0 but must be a power of two"),
        (pack_header(0, 1) + pack_key("general.alignment", 48), "alignment is 48"),
        (pack_header(0, 1) + pack_key("general.alignment", 4), "alignment is 4 but must be .* at least 8"),
        (pack_header(0, 1) + pack_key("general.alignment", "32"), "alignment is '32'"),
        (pack_header(0, 1) + pack_key("general.alignment", True), "alignment is True"),
        (one_tensor(pack_tensor_info("t", (), 0, 0)), "has 0 dimensions"),
        (one_tensor(pack_tensor_info("t", (1, 1, 1, 1, 1), 0, 0)), "has 5 dimensions; 1 to 4"),
        (one_tensor(pack_string("t") + U32(2**32 - 1) + bytes(64)), "has 4294967295 dimensions"),
        (one_tensor(pack_tensor_info("t", (4, 0), 0, 0)), "has a dimension of 0"),
        (one_tensor(pack_tensor_info("t", (2**32, 2**32), 0, 0)), "more than 2..63 weights"),
        (one_tensor(pack_tensor_info("t", (HUGE, HUGE, HUGE, HUGE), 0, 0)), "more than 2..63 weights"),
        (one_tensor(pack_tensor_info("t", (2**62, 4), 0, 0)), "more than 2..63 weights"),
        (one_tensor(pack_tensor_info("t", (2**40,), 0, 0)), "but the file ends at"),
        (one_tensor(pack_tensor_info("t", (4,), 0, HUGE - 31)), "but the file ends at"),
        (one_tensor(pack_tensor_info("t", (4,), 0, 4096)), "may be a partial download"),
        (one_tensor(pack_tensor_info("t", (4,), 0, 8)), "offset 8, not a multiple of 32"),
        (one_tensor(pack_tensor_info("t", (2, 48), 3, 0)), "stores groups of 32 weights but a row has 48"),
        (one_tensor(pack_tensor_info("t", (2, 32), 12, 0)), "Q4_K stores groups of 256 weights but a row has 32"),
        (one_tensor(pack_tensor_info("t", (256,), 39, 0)), "'t' is stored as MXFP4; supported are F32, F16, Q4_0"),
        (one_tensor(pack_tensor_info("t", (256,), 4000, 0)), "the unknown encoding 4000"),
        (one_tensor(pack_tensor_info(b"\xf0", (4,), 0, 0)), "a tensor name is not valid UTF-8"),
        (one_tensor(pack_tensor_info("t", (4,), 0, 0), bytes(0), pack_key("general.alignment", 2**31)), "ends at"),
        (two_tensors(pack_tensor_info("t", (4,), 0, 0), pack_tensor_info("t", (4,), 0, 32)), "'t' appears twice"),
        (two_tensors(pack_tensor_info("a", (16,), 0, 0), pack_tensor_info("b", (4,), 0, 32)), "'a' and 'b' overlap"),
        (two_tensors(pack_tensor_info("a", (4,), 0, 0), pack_tensor_info("b", (4,), 0, 0)), "overlap"),
    ],
)
def test_a_file_that_lies_is_refused_with_a_plain_message(tmp_path: Path, data: bytes, message: str) -> None:
    assert re.search(message, refusal(tmp_path / "m.gguf", data))


def test_names_in_messages_are_short_and_without_control_characters(tmp_path: Path) -> None:
    name = "\x1b[31m\n" + "x" * 500_000
    message = refusal(tmp_path / "m.gguf", one_tensor(pack_tensor_info(name, (4,), 39, 0)))
    assert len(message) < 1000
    assert message.removeprefix(str(tmp_path)).isprintable()
    keys = pack_header(0, 1) + pack_string(name) + U32(4)
    message = refusal(tmp_path / "m.gguf", keys)
    assert len(message) < 1000
    assert message.removeprefix(str(tmp_path)).isprintable()


def test_things_that_are_not_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"cannot open .*: No such file"):
        GGUFFile(tmp_path / "gone.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GGUFFile(tmp_path)
    with pytest.raises(ModelFileError, match="not a file"):
        GGUFFile("a\0b.gguf")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.gguf")
        with pytest.raises(ModelFileError, match="not a regular file"):
            GGUFFile(tmp_path / "pipe.gguf")


def test_a_model_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "m.gguf"
    random_llama(whole, num_layers=1, vocab_size=32, with_tokenizer=False, hidden_size=32, intermediate_size=32)
    source = GGUFWeights(whole)
    data_start = min(tensor.start for tensor in source.file.tensors.values())
    source.close()
    size = whole.stat().st_size
    for length in [size - 32, *range(data_start, size, 997)[::-1], *range(data_start)[::-1]]:
        os.truncate(whole, length)
        with pytest.raises(ModelFileError):
            GGUFWeights(whole)


SPECIAL = (0, 1, 2, 7, 8, 9, 31, 33, 127, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, HUGE)


def overwrite(data: bytearray, rng: random.Random, limit: int) -> None:
    width = rng.choice((1, 2, 4, 8))
    value = rng.choice(SPECIAL) if rng.random() < 0.6 else rng.getrandbits(64)
    at = rng.randrange(limit)
    data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")


def flip(data: bytearray, rng: random.Random, limit: int) -> None:
    data[rng.randrange(limit)] ^= 1 << rng.randrange(8)


def delete(data: bytearray, rng: random.Random, limit: int) -> None:
    at = rng.randrange(limit)
    del data[at : at + rng.randrange(1, 40)]


def repeat(data: bytearray, rng: random.Random, limit: int) -> None:
    at, length = rng.randrange(limit), rng.randrange(1, 60)
    data[at:at] = data[at : at + length]


def cut_off(data: bytearray, rng: random.Random, limit: int) -> None:
    del data[rng.randrange(len(data)) :]


MUTATIONS: tuple[Callable[[bytearray, random.Random, int], None], ...] = (overwrite, flip, delete, repeat, cut_off)


def check_mutations(folder: Path, count: int, seed: int, encoding: Encoding = "Q4_1") -> None:
    """Every mutated model is either read completely or refused with ``ModelFileError``."""
    path = folder / "m.gguf"
    width = GROUP_LAYOUT[encoding][0]
    random_llama(path, num_layers=2, vocab_size=264, hidden_size=width, intermediate_size=width, encoding=encoding)
    original = path.read_bytes()
    header_bytes = original.index(b"blk.1.ffn_down.weight") + 64
    rng = random.Random(seed)
    outcomes = {"read": 0, "refused": 0}
    for number in range(count):
        data = bytearray(original)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            weights = (6, 4, 2, 2, 0.5)
            rng.choices(MUTATIONS, weights)[0](data, rng, max(1, min(header_bytes, len(data) - 1)))
        path.write_bytes(data)
        started = time.process_time()
        try:
            source = GGUFWeights(path)
            for name in source.names():
                tensor = source.tensor(name)
                assert tensor.to_float32().shape == tensor.shape == source.shape(name)
            outcomes["read"] += 1
        except ModelFileError:
            outcomes["refused"] += 1
        except BaseException:
            print(f"mutation {number} of seed {seed}")
            raise
        assert time.process_time() - started < MAX_S
    assert min(outcomes.values()) > count // 40, outcomes  # the mutations reach both ends


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # an f16 scale may be NaN
def test_mutated_models_are_read_or_refused(tmp_path: Path) -> None:
    check_mutations(tmp_path, 300, seed=1)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("encoding", [e for e, (weights, _) in GROUP_LAYOUT.items() if weights > 1 and e != "Q4_1"])
def test_mutated_models_of_every_encoding_are_read_or_refused(tmp_path: Path, encoding: Encoding) -> None:
    check_mutations(tmp_path, 60, seed=3, encoding=encoding)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="resource is POSIX")
def test_ten_thousand_mutated_models_are_read_or_refused(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from weights.test_gguf_hostile import check_mutations
check_mutations(Path(sys.argv[1]), 10_000, seed=2)
"""
    assert peak_bytes(run_python(program, str(tmp_path))[-1]) < MAX_BYTES


#: Linux hands the parent's ru_maxrss on to what it starts: the peak of this program alone is VmHWM.
PRINT_PEAK = """
import resource, sys
if sys.platform == "linux":
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def run_python(program: str, *arguments: str) -> list[str]:
    """What a process of its own prints, in words, and last its peak memory, of which this process's says nothing."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", program + PRINT_PEAK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def peak_bytes(peak: str) -> int:
    """KiB everywhere but on macOS."""
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


def worst_strings() -> bytes:
    """As many strings as are allowed, each of one character that needs four bytes: 80 bytes of Python object."""
    return one_key(9, U32(8) + U64(1_000_000) + pack_string("🦜") * 1_000_000)


def worst_long_strings() -> bytes:
    """Strings as long as allowed, stored by Python with four bytes a character."""
    count = 23
    return one_key(9, U32(8) + U64(count) + pack_string("a" * ((1 << 20) - 4) + "🦜") * count)


def worst_keys() -> bytes:
    return pack_header(0, 65_536) + b"".join(pack_key(f"k{i}", "🦜" * 20) for i in range(65_536))


def worst_nesting() -> bytes:
    inner = (U32(0) + U64(0)) * 65_535
    return one_key(9, U32(9) + U64(65_535) + inner)


def worst_tensors() -> bytes:
    head = pack_header(65_536, 0)
    head += b"".join(pack_tensor_info(f"t{i}", (1, 1, 1, 8), 0, 32 * i) for i in range(65_536))
    return head + bytes(-len(head) % 32 + 65_536 * 32)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="resource is POSIX")
@pytest.mark.parametrize("worst", [worst_strings, worst_long_strings, worst_keys, worst_nesting, worst_tensors])
def test_the_largest_header_allowed_costs_little_time_and_memory(tmp_path: Path, worst: Callable[[], bytes]) -> None:
    (tmp_path / "m.gguf").write_bytes(worst())
    program = """
import sys, time
from octavo.core.errors import ModelFileError
from octavo.model.gguf_model import GGUFFile
before = time.process_time()
try:
    GGUFFile(sys.argv[1])
except ModelFileError:
    pass
print(time.process_time() - before)
"""
    seconds, peak = run_python(program, str(tmp_path / "m.gguf"))
    assert float(seconds) < 2 * MAX_S  # 0.8 s on an idle core; the tests' core may be shared
    assert peak_bytes(peak) < MAX_BYTES
