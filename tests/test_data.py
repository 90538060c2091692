"""04 fetch, check and stats: every known fault of LIBERO in LeRobot v3 is made here and must be named.    Run: ./run_tests.sh tests/test_data.py

Row numbers (D1, N13, ..) are those of the project's list of known faults.
"""

import json
import shutil
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import REPO, call_script, load_script, run_script
from hub import COMMIT, imitation

from common import defects, libero, quantile
from common.console import Precondition
from common.libero import LIBERO

DEMO = REPO / "tests/data/libero_demo"
DATA, EPISODES, TASKS = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet"
LEFT, WRIST = (f"videos/{c}/chunk-000/file-000.mp4" for c in LIBERO.cameras)
REPO_ID = "nvidia/LIBERO_LeRobot_v3"


@pytest.fixture
def root(tmp_path):
    """A copy of libero_goal: 3 episodes of 126, 152 and 113 frames."""
    return shutil.copytree(DEMO / "libero_goal", tmp_path / "data/libero_goal")


def run04(*argv) -> int:
    return call_script("04_fetch_libero", *argv)


def set_info(root, **changes):
    info = json.loads((root / "meta/info.json").read_text())
    for key, value in changes.items():
        info.pop(key) if value is None else info.update({key: value})
    (root / "meta/info.json").write_text(json.dumps(info))


def set_feature(root, name, **changes):
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][name] |= changes
    (root / "meta/info.json").write_text(json.dumps(info))


def set_column(file, name, change):
    """Rewrite one column of a parquet file; `change` gets a numpy array (rows of lists stacked) to alter in place, or returns another."""
    table = pq.read_table(file)
    old = table[name]
    nested = pa.types.is_nested(old.type)
    values = np.stack(old.to_numpy()) if nested else old.to_numpy().copy()
    new = change(values)
    values = values if new is None else new
    column = pa.array(list(values) if nested else values, old.type if new is None else None)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, column), file)


def put(place, value):
    def change(values):
        values[place] = value

    return change


def cut(file, share):
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])


def second_data_file(root, routed: bool):
    """Move the rows of episode 1 into file-001 as a file roll-over does; the episodes table follows if `routed`."""
    table = pq.read_table(root / DATA)
    mine = np.array(table["episode_index"]) == 1
    pq.write_table(table.filter(pa.array(~mine)), root / DATA)
    pq.write_table(table.filter(pa.array(mine)), root / DATA.replace("file-000", "file-001"))
    if routed:
        set_column(root / EPISODES, "data/file_index", put(1, 1))


def drop_columns(file, *names):
    pq.write_table(pq.read_table(file).drop_columns(list(names)), file)


def hand_made(root):
    """D5: five faults of a hand-made v3 set at once."""
    set_feature(root, "timestamp", shape=[])
    set_info(root, data_path="data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet")
    drop_columns(root / EPISODES, "data/chunk_index", "data/file_index")
    set_column(root / DATA, "action", lambda a: a[:, :1].copy())
    table = pq.read_table(root / TASKS).to_pandas().reset_index()
    pq.write_table(pa.table({"task_index": table["task_index"], "name": ["0", "1", "2"]}), root / TASKS)


CASES = {
    "D1 v2.1": (lambda r: set_info(r, codebase_version="v2.1"), ["codebase_version v3.x", "'v2.1'", "convert_dataset_v21_to_v30"]),
    "D1 v2.0": (
        lambda r: set_info(r, codebase_version="v2.0"),
        ["'v2.0'", "convert_dataset_v20_to_v21", "lerobot==0.3.3", "then python -m lerobot.scripts.convert_dataset_v21_to_v30"],
    ),
    "D1 2.3.0": (lambda r: set_info(r, codebase_version="2.3.0"), ["'2.3.0'", "fetch a v3.0 copy"]),
    "D2 roll-over": (
        lambda r: second_data_file(r, routed=False),
        [f"{EPISODES} episode 1: its rows lie in data/chunk-000/file-001.parquet, the table says {DATA}"],
    ),
    "D4 file missing": (
        lambda r: (second_data_file(r, routed=True), (r / DATA.replace("file-000", "file-001")).unlink()),
        [
            "data/chunk-000/file-001.parquet episode 1: missing, though the episodes table names it",
            "239 rows",
            "index 278 where 126 should",
        ],
    ),
    "D5 hand-made": (
        hand_made,
        [
            "feature timestamp has shape []",
            "no column data/chunk_index, data/file_index",
            "not a v3 template: it needs {chunk_index}, {file_index}",
            "actions of [1] channels, expected 7",
            f"{TASKS}: task_index 0 has the text '0'",
        ],
    ),
    "D7 pointer": (
        lambda r: (r / DATA).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        [f"{DATA}: a Git LFS pointer"],
    ),
    "D7 empty": (lambda r: (r / WRIST).write_bytes(b""), [f"{WRIST}: empty"]),
    "D7 error page": (lambda r: (r / TASKS).write_text("<!DOCTYPE html><title>429"), [f"{TASKS}: an HTML page"]),
    "D7 cut parquet": (lambda r: cut(r / DATA, 0.9), [DATA, "fetch this file again"]),
    "D7 not parquet": (lambda r: (r / EPISODES).write_bytes(b"\0" * 100), [f"{EPISODES}: not a parquet file"]),
    "D8 cut video": (
        lambda r: cut(r / WRIST, 0.5),
        [f"{WRIST} episode 1 frame ", f"{WRIST} episode 2 frame 0: 113 frame(s) cannot be decoded, 0..112"],
    ),
    "D8 flipped bytes": (
        lambda r: (r / LEFT).write_bytes((b := (r / LEFT).read_bytes())[: len(b) // 2] + b"\xff" * 2000 + b[len(b) // 2 + 2000 :]),
        [f"{LEFT} episode 1 frame ", "cannot be decoded", "InvalidDataError"],
    ),
    "D8 video missing": (lambda r: (r / LEFT).unlink(), [f"{LEFT} episode 0: missing, though the episodes table names it"]),
    "T3 beyond the end": (
        lambda r: (
            set_column(r / EPISODES, f"videos/{LIBERO.cameras[0]}/from_timestamp", put(2, 1058.0)),
            set_column(r / EPISODES, f"videos/{LIBERO.cameras[0]}/to_timestamp", put(2, 1063.65)),
        ),
        [f"{LEFT} episode 2 frame 0: 113 frame(s)", "it asks for second 1063.600; the file ends at 19.550 s"],
    ),
    "T3 doubled start": (
        lambda r: (
            set_column(r / EPISODES, f"videos/{LIBERO.cameras[1]}/from_timestamp", put(2, 6.3)),
            set_column(r / EPISODES, f"videos/{LIBERO.cameras[1]}/to_timestamp", put(2, 11.95)),
        ),
        [f"episode 2: {LIBERO.cameras[1]} starts at 6.300 s", "inside the episode before it"],
    ),
    "T2 timestamp": (
        lambda r: set_column(r / DATA, "timestamp", put(131, 0.3)),
        [f"{DATA} episode 1 frame 5: timestamp 0.3000 s, 0.2500 s at 20 fps"],
    ),
    "D15 camera size": (
        lambda r: set_feature(r, LIBERO.cameras[0], shape=[128, 128, 3]),
        [
            f"camera {LIBERO.cameras[0]} has shape [128, 128, 3], expected [256, 256, 3]",
            f"{LEFT}: frames of 256 x 256, info.json says [128, 128, 3]",
        ],
    ),
    "D15 camera names": (
        lambda r: (r / "meta/info.json").write_text(
            (r / "meta/info.json").read_text().replace("observation.images", "obs").replace("wrist_image", "hand")
        ),
        ["obs.image, obs.hand", "name them with --cameras"],
    ),
    "D15 dtype": (lambda r: set_feature(r, "action", dtype="float16"), ["feature action is float16, expected float32"]),
    "N14 frame rate": (
        lambda r: set_info(r, fps=10),
        ["10 fps where the action stats are for 20", "python 04_fetch_libero.py stats", "--fps 10"],
    ),
    "N13 NaN": (lambda r: set_column(r / DATA, "action", put((200, 3), np.nan)), [f"{DATA} episode 1 frame 74: action is not finite"]),
    "gripper of the simulator": (
        lambda r: set_column(r / DATA, "action", lambda a: np.concatenate([a[:, :6], 1 - 2 * a[:, 6:]], -1)),
        ["gripper -1: the simulator's -1 open, 1 closed", "store (1 - g) / 2"],
    ),
    "gripper inverted": (
        lambda r: set_column(r / DATA, "action", lambda a: np.concatenate([a[:, :6], 1 - a[:, 6:]], -1)),
        [f"{DATA} episode 0 frame 0: gripper closed at the first frame of most episodes", "store 1 - g"],
    ),
    "action range": (
        lambda r: set_column(r / DATA, "action", put((5, 0), 1.7)),
        [f"{DATA} episode 0 frame 5: action dx is 1.7, outside [-1, 1]"],
    ),
    "rows missing": (
        lambda r: pq.write_table(pq.read_table(r / DATA)[:-5], r / DATA),
        ["episode 2: 108 rows in the data files, 113 by the table"],
    ),
    "episode gap": (
        lambda r: set_column(r / EPISODES, "episode_index", put(2, 5)),
        ["episode 5: stands where episode 2 should", "episode 2 frame 0: an episode that meta/episodes does not list"],
    ),
    "index gap": (lambda r: set_column(r / DATA, "index", put(300, 900)), ["where 300 should follow"]),
    "frame gap": (lambda r: set_column(r / DATA, "frame_index", put(10, 77)), ["frame_index 77 does not continue its episode"]),
    "offsets": (
        lambda r: set_column(r / EPISODES, "dataset_from_index", put(1, 120)),
        ["episode 1: rows 120..278 by its index, 126..278 by the lengths"],
    ),
    "duration": (
        lambda r: set_column(r / EPISODES, f"videos/{LIBERO.cameras[0]}/to_timestamp", put(0, 9.0)),
        ["episode 0", "spans 9.000 s, its 126 frames 6.300 s"],
    ),
    "counts": (
        lambda r: set_info(r, total_frames=390, total_episodes=4),
        ["total_frames 390, the data files hold 391 rows", "total_episodes 4, meta/episodes has 3"],
    ),
    "D6 unknown task": (
        lambda r: set_column(r / DATA, "task_index", put(slice(126, 278), 7)),
        ["episode 1 frame 0: task_index 7, which meta/tasks.parquet lacks (152 rows)"],
    ),
    "v2 tasks": (
        lambda r: ((r / TASKS).unlink(), (r / "meta/tasks.jsonl").touch()),
        ["there is a tasks.jsonl of v2", "convert_dataset_v21_to_v30"],
    ),
    "no info.json": (lambda r: (r / "meta/info.json").write_text("{"), ["JSONDecodeError at "]),
}


@pytest.mark.parametrize("case", CASES)
def test_defect_is_named(root, case):
    """A data set with one known fault: the fault is listed with file, episode and frame where it has them, and with what mends it."""
    damage, expected = CASES[case]
    damage(root)
    report = defects.inspect(root, LIBERO, 20.0)
    text = "\n".join(map(str, report.defects))
    for part in expected:
        assert part in text, text or "no defect"


def test_clean_data_has_no_defect():
    """The four demonstration suites: nothing found, and the counts are those of their README."""
    reports = [defects.inspect(DEMO / s, LIBERO, 20.0) for s in LIBERO.suites]
    assert [(r.episodes, r.frames, r.found) for r in reports] == [(3, 421, []), (3, 455, []), (3, 391, []), (3, 866, [])]
    assert [r.windows for r in reports] == [r.frames - 3 * 16 for r in reports]


def test_several_faults_are_all_listed_in_one_pass(root, tmp_path, capsys):
    """Faults of a table, an action and a video together: check lists all, exits 5, and writes the same list as JSON."""
    set_column(root / DATA, "action", put((5, 0), np.nan))
    cut(root / WRIST, 0.5)
    set_info(root, total_frames=390)
    code = run04("check", "--data", root.parent, "--suites", "libero_goal", "--json", tmp_path / "report.json")
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())["libero_goal"]
    assert code == 5 and out.count("[FAIL]") == len(report["defects"]) >= 5 and report["lost"] > 113
    assert all(d["text"] in out and d["mend"] for d in report["defects"])
    assert {"file": DATA, "episode": 0, "frame": 5} in [{k: d[k] for k in ("file", "episode", "frame")} for d in report["defects"]]


def test_few_undecodable_frames_may_be_tolerated(root, capsys):
    """--max-bad as high as the number of lost frames makes warnings of them; one less is exit 5."""
    cut(root / WRIST, 0.5)
    lost = defects.inspect(root, LIBERO, 20.0).lost
    flags = ["check", "--data", root.parent, "--suites", "libero_goal", "--max-bad"]
    assert run04(*flags, lost) == 0 and "[warn] libero_goal" in capsys.readouterr().out
    assert run04(*flags, lost - 1) == 5


def test_tasks_in_any_layout_and_order(root):
    """D6: texts as the index, as column `task` or as __index_level_0__, rows in any order: no defect, the same texts by task_index."""
    texts = libero.read_tasks(root)
    order = [2, 0, 1]
    for name in ("task", "__index_level_0__"):
        pq.write_table(pa.table({"task_index": order, name: [texts[i] for i in order]}), root / TASKS)
        assert libero.read_tasks(root) == texts and not defects.inspect(root, LIBERO, 20.0).found


def test_what_is_odd_but_not_wrong_is_a_warning(root, capsys):
    """D11 and the rest: a task without episodes, an episode that never moves, a video with frames to spare: listed, exit 0.
    A task whose every episode is too short for a window is a defect."""
    set_column(root / DATA, "action", put((slice(126, 278), slice(0, 6)), 0.0))
    set_column(root / DATA, "task_index", put(slice(278, 391), 0))
    assert run04("check", "--data", root.parent, "--suites", "libero_goal") == 0
    out = capsys.readouterr().out
    assert "task 2 'put the cream cheese in the bowl' has no episode" in out and "data episode 1: 1 episode(s) never move" in out

    shutil.copytree(DEMO / "libero_goal", root, dirs_exist_ok=True)
    table = pq.read_table(root / DATA)
    pq.write_table(table[: 278 + 10], root / DATA)
    set_column(root / EPISODES, "length", put(2, 10))
    text = "\n".join(map(str, defects.inspect(root, LIBERO, 20.0).found))
    assert "task 2 'put the cream cheese in the bowl': none of its 1 episodes has 17 frames" in text
    assert f"{LEFT}: holds 391 frames, its episodes 288" in text


def stored_as_pictures(root, size=256):
    """Turn both cameras of the suite into columns of encoded pictures, as `dtype: image` data sets have them; frames of one colour."""
    import io

    from PIL import Image

    def png(shade):
        buffer = io.BytesIO()
        Image.new("RGB", (size, size), (int(shade) % 256, 40, 90)).save(buffer, "PNG")
        return {"bytes": buffer.getvalue(), "path": None}

    table = pq.read_table(root / DATA)
    frames = table["frame_index"].to_pylist()
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for k, camera in enumerate(LIBERO.cameras):
        table = table.append_column(camera, pa.array([png(i + 100 * k) for i in frames], kind))
    pq.write_table(table, root / DATA)
    shutil.rmtree(root / "videos")
    info = json.loads((root / "meta/info.json").read_text())
    for camera in LIBERO.cameras:
        info["features"][camera]["dtype"] = "image"
    info.pop("video_path")
    (root / "meta/info.json").write_text(json.dumps(info))
    episodes = pq.read_table(root / EPISODES)
    pq.write_table(episodes.drop_columns([c for c in episodes.column_names if c.startswith("videos/")]), root / EPISODES)


def test_cameras_stored_as_pictures(root):
    """`dtype: image`: read from the data files, frame by frame in their order, and a picture that does not decode is named."""
    stored_as_pictures(root)
    assert not defects.inspect(root, LIBERO, 20.0).found
    suite = libero.read_suite(root)
    frames = libero.episode_frames(suite, 1)
    assert suite.stored == ("image", "image") and frames.shape == (152, 3, 192, 320)
    assert frames[:, 0, 80, 40].tolist() == list(range(152)) and frames[:, 0, 80, 280].tolist() == [(i + 100) % 256 for i in range(152)]
    table = pq.read_table(root / DATA)
    pictures = table[LIBERO.cameras[1]].to_pylist()
    pictures[130]["bytes"] = pictures[130]["bytes"][:60]
    column = pa.array(pictures, table.schema.field(LIBERO.cameras[1]).type)
    pq.write_table(table.set_column(table.schema.get_field_index(LIBERO.cameras[1]), LIBERO.cameras[1], column), root / DATA)
    (defect,) = defects.inspect(root, LIBERO, 20.0).defects
    assert (defect.file, defect.episode, defect.frame, defect.lost) == (DATA, 1, 4, 1) and LIBERO.cameras[1] in defect.what
    bad = []
    libero.episode_frames(libero.read_suite(root), 1, bad)
    assert [(b[0], b[1]) for b in bad] == [(4, str(root / DATA))]


def test_camera_keys_come_from_info_json(root):
    """Two cameras of other names, one of them called wrist, are taken left and right; --cameras decides where that says nothing."""
    features = json.loads((root / "meta/info.json").read_text())["features"]
    renamed = {"wrist": features[LIBERO.cameras[1]], "front": features[LIBERO.cameras[0]], "action": features["action"]}
    assert libero.find_cameras(renamed, LIBERO).cameras == ("front", "wrist")
    with pytest.raises(Precondition, match=r"front, hand in info.json.*--cameras"):
        libero.find_cameras({"front": renamed["front"], "hand": renamed["wrist"]}, LIBERO)
    args = load_script("04_fetch_libero").parse_args(["check", "--cameras", "front", "hand"])
    assert libero.find_cameras(
        {"hand": renamed["wrist"], "front": renamed["front"]}, load_script("04_fetch_libero").robot(args)
    ).cameras == ("front", "hand")


# ---------------------------------------------------------------- which suites


def test_missing_suite_is_an_error(tmp_path, capsys):
    """D9: three of four suites is exit 3 with the missing one's name, for libero_all and for auto: never a smaller mix."""
    data = shutil.copytree(DEMO, tmp_path / "data")
    shutil.rmtree(data / "libero_goal")
    for flags in ([], ["--data-type", "auto"]):
        assert run04("check", "--data", data, *flags) == 3
        error = capsys.readouterr().err
        assert "no libero_goal" in error or "libero_spatial, libero_object, libero_10 in" in error
    assert run04("check", "--data", data / "libero_10") == 3 and f"pass --data {data} --suites libero_10" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("have", "chosen"),
    [(LIBERO.suites, "libero_all, since the four suites are there"), (("libero_10",), "libero_10, since it is the only suite")],
)
def test_auto_says_what_it_chose_and_why(tmp_path, capsys, have, chosen):
    """--data-type auto takes all four suites, or libero_10 where it is alone, and prints which and why."""
    for suite in have:
        shutil.copytree(DEMO / suite / "meta", tmp_path / suite / "meta")
    assert run04("check", "--data", tmp_path, "--data-type", "auto", "--dry-run") == 0
    assert f"[plan] data type: {chosen}" in capsys.readouterr().out


# ---------------------------------------------------------------- stats


def test_stats_reject_a_nan_row_with_its_place(root, tmp_path, capsys):
    """N13: stats stops at a row that is not finite and names episode, frame and file; nothing is written."""
    episode = libero.split_episodes(3)[0][1]
    set_column(root / DATA, "action", put((int(np.cumsum([0, 126, 152])[episode]) + 7, 2), np.inf))
    assert run04("stats", "--data", root.parent, "--suites", "libero_goal", "--out", tmp_path / "s.json") == 3
    assert f"the first is episode {episode} frame 7 of {root / DATA}" in capsys.readouterr().err and not (tmp_path / "s.json").exists()


def test_stats_count_rows_against_the_metadata(root, tmp_path, capsys):
    """N15: data files with doubled rows (state and action pooled, say) are not measured."""
    table = pq.read_table(root / DATA)
    pq.write_table(pa.concat_tables([table, table]), root / DATA)
    assert run04("stats", "--data", root.parent, "--suites", "libero_goal", "--out", tmp_path / "s.json") == 3
    assert "by meta/episodes" in capsys.readouterr().err


def test_stats_of_another_frame_rate(root, tmp_path, walk, capsys):
    """N14: a 10 fps copy with the built-in 20 fps stats is refused by encode with the way out; the way out works, and two rates do not mix."""
    set_column(root / DATA, "timestamp", lambda t: (t * 2).astype(np.float32))
    set_info(root, fps=10)
    flags = ["--data", root.parent, "--suites", "libero_goal"]
    encode = ["encode", *flags, "--base", walk / "models/Cosmos3-Nano", "--out", tmp_path / "cache", "--dry-run"]
    assert run04(*encode) == 3
    error = capsys.readouterr().err
    assert "expected action stats at the data's 10 fps" in error and "python 04_fetch_libero.py stats" in error
    assert run04("stats", *flags, "--out", tmp_path / "s.json") == 0
    assert quantile.load_stats(tmp_path / "s.json").fps == 10 and "R20" in capsys.readouterr().out
    assert run04(*encode, "--stats", tmp_path / "s.json") == 0
    shutil.copytree(DEMO / "libero_object", root.parent / "libero_object")
    assert run04("stats", "--data", root.parent, "--suites", "libero_goal", "libero_object", "--out", tmp_path / "t.json") == 3


def test_stats_that_do_not_fit_are_noticed(root, tmp_path, walk, capsys):
    """N6: actions 55 times too small fill a sliver of the normalizer's range: said; stats whose range most actions leave: exit 3."""
    flags = [
        "--data",
        root.parent,
        "--suites",
        "libero_goal",
        "--base",
        walk / "models/Cosmos3-Nano",
        "--out",
        tmp_path / "cache",
        "--dry-run",
    ]
    set_column(root / DATA, "action", lambda a: (a * np.array([1 / 55] * 6 + [1.0], np.float32)).astype(np.float32))
    assert run04("encode", *flags) == 0
    assert "[warn] stats: 100% of the dx steps lie within the stats' range and fill" in capsys.readouterr().out
    shutil.copytree(DEMO / "libero_goal", root, dirs_exist_ok=True)
    stats = json.loads(quantile.BUILT_IN.read_text())
    for q in ("q01", "q99"):
        stats["global_raw"][q] = [v / 55 for v in stats["global_raw"][q]]
    (tmp_path / "small.json").write_text(json.dumps(stats))
    assert run04("encode", *flags, "--stats", tmp_path / "small.json") == 3
    assert "stats of this data give 98% and 100%" in capsys.readouterr().err


# ---------------------------------------------------------------- fetch


def fetch(data, address, *flags, env=None):
    argv = ["04_fetch_libero.py", "fetch", "--data", data, "--suites", "libero_goal", "--endpoint", address, *flags]
    return run_script(
        *argv, env={"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(data.parent / "hf"), **(env or {})}, timeout=120
    )


@pytest.fixture
def source(tmp_path):
    """What the imitated hub serves: one suite and a README."""
    shutil.copytree(DEMO / "libero_goal", tmp_path / "hub/libero_goal")
    (tmp_path / "hub/README.md").write_text("data")
    return tmp_path / "hub"


def test_fetch_pins_the_commit_and_skips_what_is_there(source, tmp_path):
    """D14: main is resolved to a commit, which fetch.json records with every file's size; a rerun asks nothing, a deleted file is fetched
    alone at the recorded commit, and another revision in the same folder is exit 4."""
    data = tmp_path / "data"
    with imitation(source, REPO_ID) as (address, asked):
        run = fetch(data, address)
        assert run.returncode == 0, run.stderr
        note = json.loads((data / "fetch.json").read_text())
        assert note["revision"] == COMMIT and note["asked"] == "main" and note["suites"] == ["libero_goal"] and len(note["files"]) == 7
        assert all((data / f).read_bytes() == (source / f).read_bytes() for f in note["files"]) and not (data / "README.md").exists()
        assert f"[plan] commit: {COMMIT}" in run.stdout and "[plan] files: 7 of 1." in run.stdout
        asked.clear()
        assert "is complete" in fetch(data, address).stdout and not asked
        (data / "libero_goal" / TASKS).unlink()
        run = fetch(data, address)
        assert run.returncode == 0 and "; 1 of " in run.stdout and (data / "libero_goal" / TASKS).is_file()
        assert [a for a in asked if a.startswith("GET /datasets")] == [f"GET /datasets/{REPO_ID}/resolve/{COMMIT}/libero_goal/{TASKS}"]
        other = fetch(data, address, "--revision", "b" * 40)
        assert other.returncode == 4 and "must not mix" in other.stderr
        absent = fetch(tmp_path / "new", address, "--revision", "b" * 40)
        assert absent.returncode == 3 and "RevisionNotFound" in absent.stderr and "Traceback" not in absent.stderr
        absent = run_script("04_fetch_libero.py", "fetch", "--data", tmp_path / "x", "--endpoint", address, env={"HF_HUB_OFFLINE": "0"})
        assert absent.returncode == 3 and "it has libero_goal" in absent.stderr


def test_cut_download_ends_in_a_clear_state(source, tmp_path):
    """A file of which the server sends half: exit 3 with its name or the cause, no fetch.json, and a rerun fetches what is missing."""
    data = tmp_path / "data"
    with imitation(source, REPO_ID, cut=(f"libero_goal/{WRIST}", 1000)) as (address, _):
        run = fetch(data, address, env={"HF_HUB_DOWNLOAD_TIMEOUT": "2"})
        assert run.returncode == 3 and "finished files are kept" in run.stderr and "Traceback" not in run.stderr, run.stderr[-2000:]
        assert not (data / "fetch.json").exists() and not (data / "libero_goal" / WRIST).exists()
    with imitation(source, REPO_ID) as (address, asked):
        assert fetch(data, address).returncode == 0
        assert f"GET /datasets/{REPO_ID}/resolve/{COMMIT}/libero_goal/{WRIST}" in asked


def test_mirror_that_redirects_is_explained(source, tmp_path):
    """D10: an endpoint that answers data sets with 308 is exit 3 after one request, with the endpoint, where it points and the way out.
    HF_ENDPOINT alone is ignored for the data set, and that is said."""
    with imitation(source, REPO_ID, moved="http://127.0.0.1:9") as (address, asked):
        start = time.monotonic()
        run = fetch(tmp_path / "data", address)
        assert (
            run.returncode == 3
            and f"{address} answers 308 and points to http://127.0.0.1:9" in run.stderr
            and "drop --endpoint" in run.stderr
        )
        assert len(asked) == 1 and time.monotonic() - start < 30
        argv = ["04_fetch_libero.py", "fetch", "--data", tmp_path / "data"]
        run = run_script(*argv, env={"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": address})
        assert f"HF_ENDPOINT={address} is ignored" in run.stdout and len(asked) == 1
        assert run.returncode == 3 and "HF_HUB_OFFLINE" in run.stderr and "Traceback" not in run.stderr


def test_preview_is_drawn(tmp_path, capsys):
    """check --preview writes a picture of one window; it is not blank."""
    from PIL import Image

    assert run04("check", "--data", DEMO, "--suites", "libero_goal", "--preview", tmp_path / "p.png") == 0
    picture = np.array(Image.open(tmp_path / "p.png").convert("L"))
    assert picture.shape[1] > 1000 and picture.std() > 40
