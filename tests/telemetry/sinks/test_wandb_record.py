"""Whether a record of wandb is complete, for records that wandb wrote and for any cut of them."""

import struct
import threading

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from runner.telemetry.sinks.wandb_record import gets_end, has_end
from runner.telemetry.sinks.wandb_sink import WandbSink

BLOCK = 2**15


@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize("keys", [1, 2000])
@pytest.mark.product(every=2)
def test_a_record_that_wandb_wrote_is_complete_and_no_part_of_it_is(tmp_path, keys):
    sink = WandbSink(
        tmp_path,
        mode="offline",
        timeout=120,
        project="p",
        group=None,
        tags=[],
        job_type="train",
        name="n",
        run_id="whole1",
        config={"seed": 0},
    )
    for step in range(4):
        sink.write({"train/step": step, **{f"grad/norm/{n}": n / 7 for n in range(keys)}})
    sink.close({"steps": 4}, 1)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-whole1.wandb")
    content = file.read_bytes()
    assert (len(content) > 3 * BLOCK) == (keys > 1)
    assert has_end(file)
    for size in [*range(len(content) - 100, len(content)), *range(0, len(content) - 100, 997)]:
        file.write_bytes(content[:size])
        assert not has_end(file)
    file.unlink()
    assert not has_end(file)
    if keys == 1:  # its end comes late, or not at all
        file.write_bytes(content[:-9])
        later = threading.Timer(0.3, file.write_bytes, [content])
        later.start()
        assert gets_end(file)
        later.join()
        file.write_bytes(content[:-9])
        assert not gets_end(file)


def framed(messages):
    """Frame messages as LevelDB's log does, after the seven bytes that wandb writes first."""
    written = bytearray(b":W&B\xee\xbe\0")
    for message in messages:
        kind, rest = 1, message  # 1 whole, 2 first, 3 middle, 4 last
        while True:
            if (room := BLOCK - len(written) % BLOCK) < 7:
                written += bytes(room)
                room = BLOCK
            chunk, rest = rest[: room - 7], rest[room - 7 :]
            if rest:
                kind = 2 if kind == 1 else 3
            elif kind != 1:
                kind = 4
            written += struct.pack("<IHB", 0, len(chunk), kind) + chunk
            if not rest:
                break
    return bytes(written)


def test_the_end_is_found_wherever_it_lies_in_a_block(tmp_path):
    file = tmp_path / "run.wandb"
    end = Record(num=146)  # 0x92 0x01, which also begins the field exit
    end.exit.exit_code = 3
    for size in [*range(BLOCK - 60, BLOCK + 10), 5 * BLOCK]:
        row = Record(num=146)
        row.output.line = "\x92\x01" * (size // 3)
        messages = [row.SerializeToString()] * 2
        file.write_bytes(framed(messages))
        assert not has_end(file)
        file.write_bytes(framed([*messages, end.SerializeToString()]))
        assert has_end(file)
        file.write_bytes(
            framed([*messages, end.SerializeToString(), Record(num=1).SerializeToString()])
        )
        assert has_end(file)
