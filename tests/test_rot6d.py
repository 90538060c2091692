"""common/rot6d.py: columns, not rows; exact from 0 to pi; no degenerate vector decoded in silence.

Run: python -m pytest tests/test_rot6d.py
Golden: tests/golden/libero_golden.json, blocks rot6d, rot6d_decode_noisy, action (float32, from the reference implementation).
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy.linalg import polar
from scipy.spatial.transform import Rotation

from common import rot6d

GOLDEN = json.loads((Path(__file__).parent / "golden/libero_golden.json").read_text())
EPS32, EPS64 = float(np.finfo(np.float32).eps), float(np.finfo(np.float64).eps)
SVD64 = 64 * EPS64  # LAPACK keeps the factors of a 3x3 orthonormal to a small multiple of eps; 20 eps was seen
OPEN, CLOSED = 1.0, 0.0  # the data set's gripper
KINDS = {"numpy": np.asarray, "torch": torch.as_tensor}
DTYPES = {"numpy": (np.float32, np.float64), "torch": (torch.bfloat16, torch.float32, torch.float64)}
# function, last axes of its argument, last axes of its result
FUNCTIONS = {
    "axis_angle_to_matrix": ((3,), (3, 3)),
    "matrix_to_axis_angle": ((3, 3), (3,)),
    "matrix_to_rot6d": ((3, 3), (6,)),
    "axis_angle_to_rot6d": ((3,), (6,)),
    "rot6d_to_matrix": ((6,), (3, 3)),
    "rot6d_to_axis_angle": ((6,), (3,)),
    "encode_action": ((7,), (10,)),
    "decode_action": ((10,), (7,)),
}
AXES = [
    (1, 0, 0),
    (0, 1, 0),
    (0, 0, 1),
    (-1, 0, 0),
    (0, 0, -1),
    (1, 1, 0),
    (1, 0, -1),
    (1, 1, 1),
    (-1, 2, -3),
    (1, 1e-9, 0),
    (1e-4, -1, 1e-7),
]
ANGLES = [0.0, 1e-200, 1e-9, 1e-8, 1e-4, 1.0, math.pi / 2, math.pi - 1e-3, math.pi - 1e-6, math.pi - 1e-9, math.pi]
DEGENERATE = {
    "zeros": [0, 0, 0, 0, 0, 0],
    "column 0 zero": [0, 0, 0, 0, 1, 0],
    "column 1 zero": [1, 0, 0, 0, 0, 0],
    "column 0 tiny": [1e-13, 0, 0, 0, 1, 0],
    "column 1 tiny": [1, 0, 0, 0, 1e-13, 0],
    "parallel": [1, 2, 3, 2, 4, 6],
    "opposite": [1, 2, 3, -1, -2, -3],
    "nearly parallel": [1, 0, 0, 1, 1e-8, 0],
    "NaN": [1, 0, 0, 0, math.nan, 0],
    "infinite": [math.inf, 0, 0, 0, 1, 0],
}

axis_angles = st.tuples(*[st.floats(-4, 4)] * 3).map(np.array)
six_vectors = st.tuples(*[st.floats(-1e3, 1e3)] * 6).map(np.array)


def golden(block, key):
    return np.array(GOLDEN[block][key], np.float32)


def close(actual, expected, atol):
    np.testing.assert_allclose(np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol=0, atol=atol)


def sine(v):
    """Sine of the angle between the two columns of a 6-vector; 0 if one is (nearly) zero."""
    n0, n1 = np.linalg.norm(v[:3]), np.linalg.norm(v[3:])
    return 0.0 if min(n0, n1) < 1e-6 else np.linalg.norm(np.cross(v[:3] / n0, v[3:] / n1))


def fixed_vectors(dtype=np.float64):
    """Every axis at every angle of AXES and ANGLES, [n, 3]."""
    axes = np.array(AXES, np.float64)
    axes /= np.linalg.norm(axes, axis=-1, keepdims=True)
    return (axes[:, None] * np.array(ANGLES)[:, None]).reshape(-1, 3).astype(dtype)


def sample(shape, kind="numpy", dtype=np.float64):
    """A valid argument of that shape: identity matrices for (..., 3, 3), else distinct numbers that are no degenerate rot6d."""
    if shape[-2:] == (3, 3):
        value = np.broadcast_to(np.eye(3), shape).copy()
    else:
        value = np.broadcast_to(np.array([0.3, -0.1, 0.2, 0.8, 0.1, -0.2, 0.1, 0.9, 0.3, 1.0])[: shape[-1]], shape).copy()
    return KINDS[kind](value).astype(dtype) if kind == "numpy" else KINDS[kind](value).to(dtype)


def check_encoder(encode):
    """The golden check of an encoder, axis-angle -> rot6d. Largest error seen: 0 bits of float32; 1 eps is allowed to other libms."""
    close(encode(golden("rot6d", "axis_angle")), golden("rot6d", "rot6d"), EPS32)


# Golden


@pytest.mark.parametrize("kind", KINDS)
def test_golden_encoding(kind):
    """The reference's rot6d of 29 axis-angles, 0, 1e-9 and pi among them, is reproduced."""
    check_encoder(lambda v: rot6d.axis_angle_to_rot6d(KINDS[kind](v)))


@pytest.mark.parametrize("kind", KINDS)
def test_golden_matrices(kind):
    """The reference's matrices of the 29 axis-angles are reproduced. Largest error seen: 5e-17."""
    close(rot6d.axis_angle_to_matrix(KINDS[kind](golden("rot6d", "axis_angle"))), golden("rot6d", "matrix"), EPS32)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_decoding(kind):
    """The 29 golden rot6d decode to the golden matrices. Largest error seen: 0.5 eps (1 ulp below one)."""
    close(rot6d.rot6d_to_matrix(KINDS[kind](golden("rot6d", "rot6d"))), golden("rot6d", "matrix"), 2 * EPS32)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_round_trip_through_axis_angle(kind):
    """Golden rot6d -> axis-angle -> matrix gives the golden matrix. Largest error seen: 0.65 eps; an angle of pi in float32 is off by 1 eps."""
    back = rot6d.axis_angle_to_matrix(rot6d.rot6d_to_axis_angle(KINDS[kind](golden("rot6d", "rot6d"))))
    close(back, golden("rot6d", "matrix"), 2 * EPS32)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_projection(kind):
    """The reference's SVD projection of 14 vectors that are not orthonormal is reproduced. Largest error seen: 0.5 eps."""
    close(rot6d.rot6d_to_matrix(KINDS[kind](golden("rot6d_decode_noisy", "rot6d"))), golden("rot6d_decode_noisy", "matrix_svd"), 2 * EPS32)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_projection_as_axis_angle(kind):
    """The axis-angle of the projected rotation is reproduced, norms up to 3.136 included. Largest error seen: 1 eps (half an ulp of pi)."""
    actual = rot6d.rot6d_to_axis_angle(KINDS[kind](golden("rot6d_decode_noisy", "rot6d")))
    close(actual, golden("rot6d_decode_noisy", "axis_angle_svd"), 4 * EPS32)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_action_encoding(kind):
    """The 16 golden actions of 7 numbers become the golden 10. Largest error seen: 0."""
    close(rot6d.encode_action(KINDS[kind](golden("action", "action7"))), golden("action", "action10"), EPS32)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_action_decoding(kind):
    """The golden 10 numbers become the 16 actions of 7. Largest error seen: 0.25 eps."""
    close(rot6d.decode_action(KINDS[kind](golden("action", "action10"))), golden("action", "action7"), 2 * EPS32)


# Negative controls of the golden check


def test_row_coded_rot6d_is_caught():
    """R1: the golden check fails on an encoder that takes the first two ROWS, as pytorch3d does."""
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_encoder(lambda v: rot6d.axis_angle_to_matrix(v)[..., :2, :].reshape(-1, 6))


def test_interleaved_rot6d_is_caught():
    """R2: the golden check fails on an encoder that interleaves the columns, R[:, :2].ravel()."""
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_encoder(lambda v: rot6d.axis_angle_to_matrix(v)[..., :2].reshape(-1, 6))


def test_rows_decoded_as_columns_are_the_inverse():
    """R1: of (0.1, 0.2, 0.3) the columns decode to R and the rows to R transposed, which is far from R."""
    matrix = Rotation.from_rotvec([0.1, 0.2, 0.3]).as_matrix()
    close(rot6d.rot6d_to_matrix(matrix[:, :2].T.ravel()), matrix, 8 * EPS64)
    close(rot6d.rot6d_to_matrix(matrix[:2].ravel()), matrix.T, 8 * EPS64)
    assert np.linalg.norm(matrix - matrix.T) > 0.5


def test_interleaved_columns_decode_to_neither_side():
    """R2: the interleaved layout decodes neither to R nor to R transposed."""
    matrix = Rotation.from_rotvec([0.1, 0.2, 0.3]).as_matrix()
    decoded = rot6d.rot6d_to_matrix(matrix[:, :2].ravel())
    assert min(np.linalg.norm(decoded - matrix), np.linalg.norm(decoded - matrix.T)) > 0.5


# Axis-angle and matrices


@given(axis_angles)
@example(np.zeros(3))
@example(np.array([1e-9, 0, 0]))
@example(np.array([math.pi, 0, 0]))
def test_matrix_equals_scipy(v):
    """Every axis-angle, any norm, gives scipy's matrix."""
    close(rot6d.axis_angle_to_matrix(v), Rotation.from_rotvec(v).as_matrix(), 16 * EPS64)


@given(axis_angles)
@example(np.array([1e-9, 0, 0]))
@example(np.array([0, 3.1, 0]))
def test_axis_angle_equals_scipy(v):
    """Every rotation that is not within 1e-3 of pi gives scipy's rotation vector (at pi the sign is free)."""
    rotation = Rotation.from_rotvec(v)
    assume(rotation.magnitude() < math.pi - 1e-3)
    close(rot6d.matrix_to_axis_angle(rotation.as_matrix()), rotation.as_rotvec(), 32 * EPS64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "eps"), [(np.float32, EPS32), (np.float64, EPS64)])
def test_round_trip_as_matrices_from_0_to_pi(kind, dtype, eps):
    """R3: matrix -> axis-angle -> matrix holds at 0, 1e-9, near pi and at pi, about 11 axes, within 4 eps of the type."""
    matrix = rot6d.axis_angle_to_matrix(KINDS[kind](fixed_vectors(dtype)))
    close(rot6d.axis_angle_to_matrix(rot6d.matrix_to_axis_angle(matrix)), matrix, 4 * eps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "eps"), [(np.float32, EPS32), (np.float64, EPS64)])
def test_round_trip_as_rot6d_from_0_to_pi(kind, dtype, eps):
    """R3: axis-angle -> rot6d -> axis-angle is the same rotation at the same angles and axes, within 8 eps (one SVD more)."""
    v = KINDS[kind](fixed_vectors(dtype))
    back = rot6d.rot6d_to_axis_angle(rot6d.axis_angle_to_rot6d(v))
    close(rot6d.axis_angle_to_matrix(back), rot6d.axis_angle_to_matrix(v), 8 * eps)


@given(axis_angles)
def test_round_trip_anywhere(v):
    """axis-angle -> rot6d -> axis-angle is the same rotation for any vector."""
    back = rot6d.rot6d_to_axis_angle(rot6d.axis_angle_to_rot6d(v))
    close(rot6d.axis_angle_to_matrix(back), rot6d.axis_angle_to_matrix(v), 16 * EPS64)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_is_the_identity_exactly(kind):
    """R5: the zero vector gives the identity and the identity gives the zero vector, bit for bit."""
    zero = KINDS[kind](np.zeros(3))
    np.testing.assert_array_equal(rot6d.axis_angle_to_matrix(zero), np.eye(3))
    np.testing.assert_array_equal(rot6d.matrix_to_axis_angle(KINDS[kind](np.eye(3))), np.zeros(3))


@given(st.tuples(*[st.floats(-1e-6, 1e-6)] * 3).map(lambda t: np.array(t, np.float32)))
@example(np.array([1e-9, 0, 0], np.float32))
@example(np.array([1e-8, -1e-8, 1e-8], np.float32))
def test_tiny_rotations_keep_their_digits(v):
    """R5: near the identity a float32 matrix still holds the vector: it comes back within 2 eps of its own size, never NaN."""
    close(rot6d.matrix_to_axis_angle(rot6d.axis_angle_to_matrix(v)), v, 2 * EPS32 * np.abs(v).max())


@given(axis_angles)
@example(np.array([3.1140323, -0.1307617, -0.65380156]))
@example(np.array([0, 0, 2 * math.pi]))
def test_norm_comes_back_canonical(v):
    """R7: a vector of any norm comes back as the same rotation with a norm of at most pi."""
    back = rot6d.matrix_to_axis_angle(rot6d.axis_angle_to_matrix(v))
    assert np.linalg.norm(back) <= math.pi * (1 + 2 * EPS64)
    close(Rotation.from_rotvec(back).as_matrix(), Rotation.from_rotvec(v).as_matrix(), 32 * EPS64)


def test_norm_above_pi_is_another_vector():
    """R7: norm 3.185 comes back shorter and turned round, v (1 - 2 pi / |v|), not as it was."""
    v = np.array([3.1140323, -0.1307617, -0.65380156])
    close(rot6d.matrix_to_axis_angle(rot6d.axis_angle_to_matrix(v)), v * (1 - 2 * math.pi / np.linalg.norm(v)), 32 * EPS64)


def test_axis_angle_is_not_euler():
    """R10: (0.5, 0.5, 0) is read as a rotation vector; the Euler angles xyz of the same numbers are 0.1 away or more."""
    v = [0.5, 0.5, 0.0]
    matrix = rot6d.axis_angle_to_matrix(np.array(v))
    for convention in ("xyz", "XYZ"):
        assert np.abs(matrix - Rotation.from_euler(convention, v).as_matrix()).max() > 0.1


# Projection


@given(six_vectors)
@example(np.array([2, 0, 0, 0.1, 3, 0.0]))
@example(np.array([1, 0.1, 0, 0.1, 1, 0.0]))
@example(np.array([1e3, 0, 0, 0, 0, 1e-5]))
def test_any_other_vector_decodes_to_a_rotation(v):
    """Every 6-vector that is not degenerate decodes to an orthonormal matrix of determinant +1."""
    assume(sine(v) > 1e-4)
    matrix = rot6d.rot6d_to_matrix(v)
    close(matrix @ matrix.T, np.eye(3), SVD64)
    close(np.linalg.det(matrix), 1.0, SVD64)


@given(st.tuples(*[st.floats(-3, 3)] * 6).map(np.array))
@example(np.array([2, 0, 0, 0.1, 3, 0.0]))
def test_projection_is_the_polar_factor(v):
    """R9: decoding is the orthogonal polar factor of [c0, c1, c0 x c1], as scipy computes it."""
    assume(sine(v) > 0.1 and min(np.linalg.norm(v[:3]), np.linalg.norm(v[3:])) > 0.1)
    c0, c1 = v[:3], v[3:]
    close(rot6d.rot6d_to_matrix(v), polar(np.stack([c0, c1, np.cross(c0, c1)], -1))[0], 1e-12)


@pytest.mark.parametrize("v", [[2, 0, 0, 0.1, 3, 0], [1, 0.1, 0, 0.1, 1, 0]])
def test_projection_is_not_gram_schmidt(v):
    """R9: on columns that are not orthogonal Gram-Schmidt keeps the first column's direction and the SVD moves it, by 0.01 or more."""
    first = rot6d.rot6d_to_matrix(np.array(v, np.float64))[:, 0]
    assert np.linalg.norm(first - np.array(v[:3]) / np.linalg.norm(v[:3])) > 0.01


@given(six_vectors)
def test_projection_is_idempotent(v):
    """Decoding what was decoded and encoded again changes nothing beyond rounding."""
    assume(sine(v) > 1e-4)
    once = rot6d.rot6d_to_matrix(v)
    close(rot6d.rot6d_to_matrix(rot6d.matrix_to_rot6d(once)), once, SVD64)


# Degenerate input


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DEGENERATE)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy says so of infinity times zero
def test_degenerate_vector_raises(kind, name):
    """A zero, parallel, NaN or infinite column raises and says how many vectors are bad."""
    with pytest.raises(ValueError, match=r"^1 rot6d vector.*determine no rotation"):
        rot6d.rot6d_to_matrix(KINDS[kind](np.array(DEGENERATE[name], np.float64)))


@pytest.mark.parametrize("function", ["rot6d_to_axis_angle", "decode_action"])
def test_degenerate_vector_raises_in_what_rests_on_it(function):
    """One bad vector in a batch of two makes the axis-angle and the action raise as well."""
    batch = sample((2, *FUNCTIONS[function][0]))
    batch[1] = 0
    with pytest.raises(ValueError, match="1 rot6d vector"):
        getattr(rot6d, function)(batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_degenerate_vectors_are_counted_on_request(kind):
    """rot6d_to_matrix_or_identity counts the bad vectors of a batch, gives each the identity and leaves the good ones as they are."""
    good = sample((2, 6))
    batch = np.concatenate([good[:1], np.array(list(DEGENERATE.values()), np.float64), good[1:]])
    matrix, bad = rot6d.rot6d_to_matrix_or_identity(KINDS[kind](batch))
    assert bad == len(DEGENERATE)
    close(matrix[1:-1], np.broadcast_to(np.eye(3), (bad, 3, 3)), 2 * EPS64)
    np.testing.assert_array_equal(np.asarray(matrix)[[0, -1]], rot6d.rot6d_to_matrix(KINDS[kind](good)))


# Shapes, types, numpy and torch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [(), (1,), (3, 1, 2), (0,)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_any_batch_shape(function, batch, kind):
    """Leading axes pass through every function: none, one, several, and an empty batch."""
    takes, gives = FUNCTIONS[function]
    assert tuple(getattr(rot6d, function)(sample(batch + takes, kind, DTYPES[kind][-1])).shape) == batch + gives


@pytest.mark.parametrize(("kind", "dtype"), [(k, d) for k in KINDS for d in DTYPES[k]])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_type_and_dtype_are_kept(function, kind, dtype):
    """numpy gives numpy and torch gives torch, in the dtype that came in."""
    x = sample((2, *FUNCTIONS[function][0]), kind, dtype)
    y = getattr(rot6d, function)(x)
    assert (type(y), y.dtype) == (type(x), x.dtype)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_input_is_left_alone(function):
    """No function writes into its argument."""
    x = sample((2, *FUNCTIONS[function][0]))
    before = x.copy()
    getattr(rot6d, function)(x)
    np.testing.assert_array_equal(x, before)


@given(st.lists(axis_angles, min_size=1, max_size=5).map(np.array))
@example(fixed_vectors())
def test_numpy_equals_torch_on_rotations(v):
    """Both libraries give the same matrices and the same rotations back, within rounding of their sines."""
    matrix = rot6d.axis_angle_to_matrix(v)
    close(rot6d.axis_angle_to_matrix(torch.from_numpy(v)), matrix, 8 * EPS64)
    back = rot6d.matrix_to_axis_angle(torch.from_numpy(matrix))
    close(back, rot6d.matrix_to_axis_angle(matrix), 8 * EPS64)


@given(st.lists(six_vectors.filter(lambda v: sine(v) > 1e-3), min_size=1, max_size=4).map(np.array))
def test_numpy_equals_torch_on_projections(v):
    """Both libraries project to the same rotation; 1e-10 leaves room for two columns that are nearly parallel."""
    close(rot6d.rot6d_to_matrix(torch.from_numpy(v)), rot6d.rot6d_to_matrix(v), 1e-10)


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f != "matrix_to_rot6d"])  # which takes two columns of whatever it gets
def test_wrong_width_raises(function):
    """A last axis of another width raises and the message carries the shape."""
    takes = FUNCTIONS[function][0]
    with pytest.raises(ValueError, match=rf"\(2, .*{takes[-1] + 1}\)"):
        getattr(rot6d, function)(np.ones((2, *takes[:-1], takes[-1] + 1)))


# Actions


@given(st.lists(st.tuples(*[st.floats(-1.7, 1.7)] * 7), min_size=1, max_size=6).map(np.array))
@example(np.zeros((1, 7)))
def test_action_round_trip(action):
    """[n, 7] -> [n, 10] -> [n, 7]: position and gripper come back bit for bit, a rotation below pi within rounding."""
    back = rot6d.decode_action(rot6d.encode_action(action))
    np.testing.assert_array_equal(back[:, [0, 1, 2, 6]], action[:, [0, 1, 2, 6]])
    close(back[:, 3:6], action[:, 3:6], 32 * EPS64)


def test_action_layout():
    """Ten numbers: position, column 0, column 1, gripper."""
    action = np.array([1.0, 2.0, 3.0, 0.1, 0.2, 0.3, OPEN])
    matrix = Rotation.from_rotvec(action[3:6]).as_matrix()
    close(rot6d.encode_action(action), [1, 2, 3, *matrix[:, 0], *matrix[:, 1], OPEN], 4 * EPS64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("gripper", "command"), [(OPEN, -1.0), (CLOSED, 1.0), (0.5, 0.0), (0.25, 0.5), (1.3, -1.0), (-0.4, 1.0)])
def test_gripper_command(kind, gripper, command):
    """The data set's open is robosuite's -1 and its closed +1, linear between and clipped beyond."""
    np.testing.assert_array_equal(rot6d.env_gripper(KINDS[kind](np.array([gripper]))), [command])
