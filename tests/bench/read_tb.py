"""A million scalar events in one file: 07_read_tb.py's reader against TensorBoard's EventAccumulator, each in a process of its own.

Run:    python tests/bench/read_tb.py [--points 1000000]
Prints seconds and peak memory of both (interpreter and imports included in the memory, not in the seconds), their ratio, and the bytes a
point that stays. Exit 5 if they disagree on a value, or the reader is not 5 times faster.
"""

import argparse
import json
import resource
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
TAGS = 8  # as many as a step of 05_train_fsdp2.py logs


def write(path: Path, points: int) -> None:
    """What SummaryWriter writes, quicker: TensorBoard's own writer takes a minute for a million."""
    import numpy as np
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    from common import tb

    def masked(parts):
        lengths, crcs = np.array([len(p) for p in parts]), np.zeros(len(parts), np.uint32)
        for length in np.unique(lengths):
            at = np.flatnonzero(lengths == length)
            crcs[at] = tb.masked_crc(np.frombuffer(b"".join(parts[i] for i in at), np.uint8).reshape(len(at), length))
        return [struct.pack("<I", crc) for crc in crcs.tolist()]

    with open(path, "wb") as f:
        for first in range(0, points, 50_000):
            events = []
            for i in range(first, min(first + 50_000, points)):
                value = Summary.Value(tag=f"train/tag_{i % TAGS}", simple_value=i % 1000 / 7)
                events.append(Event(wall_time=1.7e9 + i / 8, step=i // TAGS, summary=Summary(value=[value])).SerializeToString())
            heads = [struct.pack("<Q", len(e)) for e in events]
            f.writelines(b"".join(p) for p in zip(heads, masked(heads), events, masked(events), strict=True))


def child(reader: str, path: Path) -> dict:
    """Read the file; seconds, points, a checksum of the values, memory."""
    if reader == "ours":
        from tensorboard.compat.proto import event_pb2  # noqa: F401 (imported before the clock starts, on both sides)

        from common import tb

        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        (run,) = tb.read([path])
        series = {tag: s.values.tolist() for tag, s in run.series.items()} if (seconds := time.perf_counter() - start) else {}
    else:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
        accumulator.Reload()
        seconds = time.perf_counter() - start
        series = {tag: [e.value for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = {tag: (len(v), sum(v), v[0], v[-1]) for tag, v in sorted(series.items())}
    return dict(seconds=seconds, peak_mib=peak / 1024, grown_mib=(peak - before) / 1024, total=total)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--points", type=int, default=1_000_000, help="scalar events in the file")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child[0], Path(args.child[1]))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.out.tfevents.1"
        write(path, args.points)
        size = path.stat().st_size
        seen = {}
        for reader in ("ours", "theirs"):
            out = subprocess.run([sys.executable, __file__, "--child", reader, str(path)], check=True, capture_output=True, text=True)
            seen[reader] = json.loads(out.stdout.splitlines()[-1])
    for reader, s in seen.items():
        print(
            f"{reader}: {s['seconds']:.2f} s, peak {s['peak_mib']:.0f} MiB, of it {s['grown_mib']:.0f} MiB for {size / 2**20:.0f} MiB of events"
        )
    ratio = seen["theirs"]["seconds"] / seen["ours"]["seconds"]
    same = seen["ours"]["total"] == seen["theirs"]["total"]
    print(
        f"ratio {ratio:.1f}; {seen['ours']['grown_mib'] * 2**20 / args.points:.0f} bytes a point at the peak; values {'equal' if same else 'DIFFER'}"
    )
    return 0 if same and ratio >= 5 else 5


if __name__ == "__main__":
    raise SystemExit(main())
