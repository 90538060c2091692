"""How the cost of `04_fetch_libero.py check` grows with the data: the demonstration suites at 1x, 2x and 4x their length.

Run:    python tests/bench/check.py
Prints  seconds and frames/s of each size, and how much more a frame costs at 4x than at 1x.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))


def lengthen(root: Path, times: int) -> None:
    """Repeat every episode of a suite: rows, episodes and video frames (packets copied, with later times)."""
    import av
    import pyarrow as pa
    import pyarrow.parquet as pq

    info = json.loads((root / "meta/info.json").read_text())
    data, episodes = root / "data/chunk-000/file-000.parquet", root / "meta/episodes/chunk-000/file-000.parquet"
    rows, frames, count, fps = pq.read_table(data), info["total_frames"], info["total_episodes"], info["fps"]

    def shifted(table, steps):
        for name, step in steps.items():
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(table[name].to_numpy() + step))
        return table

    table = pq.read_table(episodes)
    spans = [c for c in table.column_names if c.endswith("_timestamp") and c.startswith("videos/")]
    pq.write_table(pa.concat_tables([shifted(rows, {"index": k * frames, "episode_index": k * count}) for k in range(times)]), data)
    steps = {"episode_index": count, "dataset_from_index": frames, "dataset_to_index": frames, **dict.fromkeys(spans, frames / fps)}
    pq.write_table(pa.concat_tables([shifted(table, {n: k * s for n, s in steps.items()}) for k in range(times)]), episodes)
    for video in sorted((root / "videos").rglob("*.mp4")):
        longer = video.with_suffix(".longer.mp4")
        with av.open(str(longer), "w") as out:
            stream = None
            for k in range(times):
                with av.open(str(video)) as source:
                    origin = source.streams.video[0]
                    stream = stream or out.add_stream_from_template(origin, opaque=True)
                    for packet in source.demux(origin):
                        if packet.dts is not None:
                            packet.pts += round(k * frames / fps / origin.time_base)
                            packet.dts += round(k * frames / fps / origin.time_base)
                            packet.stream = stream
                            out.mux(packet)
        longer.replace(video)
    (root / "meta/info.json").write_text(json.dumps(info | {"total_frames": times * frames, "total_episodes": times * count}))


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    from common import console, defects
    from common.libero import LIBERO

    cost = {}
    defects.inspect(REPO / "tests/data/libero_demo/libero_goal", LIBERO, LIBERO.fps)  # imports and file cache
    for times in (1, 2, 4):
        with tempfile.TemporaryDirectory() as tmp:
            data = shutil.copytree(REPO / "tests/data/libero_demo", Path(tmp) / "data")
            for suite in LIBERO.suites:
                lengthen(data / suite, times)
            start = time.perf_counter()
            reports = [defects.inspect(data / suite, LIBERO, LIBERO.fps) for suite in LIBERO.suites]
            seconds = time.perf_counter() - start
        found = [str(d) for r in reports for d in r.found]
        assert not found, found[:5]
        frames = sum(r.frames for r in reports)
        cost[times] = seconds / frames
        console.ok(f"{times}x", f"{frames} frames of two cameras in {seconds:.2f} s, {frames / seconds:.0f} frames/s")
    console.done("bench/check", cost_of_a_frame_4x_to_1x=f"{cost[4] / cost[1]:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
