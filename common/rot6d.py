"""Rotations and LIBERO actions: axis-angle <-> matrix <-> rot6d, 7-D <-> 10-D.

Convention: rot6d is the first two COLUMNS of the matrix, one after the other: [R00 R10 R20 R01 R11 R21]
(cosmos-framework's pose utilities; pytorch3d uses rows, and mixing the two silently gives the inverse rotation).
Decoding projects onto SO(3) by SVD, as NVIDIA's evaluation server does; Gram-Schmidt differs on network output.

Every function takes numpy arrays or torch tensors of any batch shape, works on the last axis (or two), computes in
float64 and returns the input's type, dtype and device. Not differentiable at the identity; not meant to be trained through.
"""

import sys

import numpy as np

# Below this sine of the angle between the two columns (or this norm), a 6-vector does not determine a rotation.
DEGENERATE_SINE = 1e-6
DEGENERATE_NORM = 1e-12


def _float64(x):
    """`x` in float64 with the module that holds its functions, and the way back to its own dtype."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        dtype = x.dtype if x.is_floating_point() else torch.float64
        return torch, x.to(torch.float64), lambda y: y.to(dtype)
    x = np.asarray(x)
    dtype = x.dtype if np.issubdtype(x.dtype, np.floating) else np.float64
    return np, x.astype(np.float64), lambda y: y.astype(dtype)


def _need_last(x, n, what):
    if x.shape[-1] != n:
        raise ValueError(f"{what} has {n} numbers on its last axis; got shape {tuple(x.shape)}")


def axis_angle_to_matrix(axis_angle):
    """Rotation vectors [..., 3] in rad -> matrices [..., 3, 3]. Exact at 0; any norm is accepted."""
    xp, v, back = _float64(axis_angle)
    _need_last(v, 3, "axis-angle")
    angle = xp.linalg.vector_norm(v, axis=-1, keepdims=True) if xp is np else xp.linalg.vector_norm(v, dim=-1, keepdim=True)
    small = angle < 1e-8  # there sin(a/2)/a = 1/2 to the last bit of float64
    scale = xp.where(small, xp.full_like(angle, 0.5), xp.sin(angle / 2) / xp.where(small, xp.ones_like(angle), angle))
    w = xp.cos(angle / 2)[..., 0]
    x, y, z = (scale * v)[..., 0], (scale * v)[..., 1], (scale * v)[..., 2]
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return back(xp.stack([xp.stack(row, -1) for row in rows], -2))


def matrix_to_axis_angle(matrix):
    """Rotation matrices [..., 3, 3] -> rotation vectors [..., 3] in rad, norm in [0, pi].

    Goes through the quaternion component of largest size, so it holds near 0 and near pi about any axis; at pi the sign
    of the axis is arbitrary.
    """
    xp, m, back = _float64(matrix)
    if tuple(m.shape[-2:]) != (3, 3):
        raise ValueError(f"a rotation matrix ends in (3, 3); got shape {tuple(m.shape)}")
    m00, m01, m02, m10, m11, m12, m20, m21, m22 = (m[..., i, j] for i in range(3) for j in range(3))
    # Row k is the quaternion (w, x, y, z) times 4 q_k: the row with the largest diagonal entry loses no digits.
    rows = [
        [1 + m00 + m11 + m22, m21 - m12, m02 - m20, m10 - m01],
        [m21 - m12, 1 + m00 - m11 - m22, m01 + m10, m02 + m20],
        [m02 - m20, m01 + m10, 1 - m00 + m11 - m22, m12 + m21],
        [m10 - m01, m02 + m20, m12 + m21, 1 - m00 - m11 + m22],
    ]
    best = xp.stack([rows[k][k] for k in range(4)], -1).argmax(-1)
    q = xp.stack(rows[0], -1)
    for k in (1, 2, 3):
        q = xp.where((best == k)[..., None], xp.stack(rows[k], -1), q)
    q = xp.where(q[..., :1] < 0, -q, q)
    vector = q[..., 1:]
    norm = (vector * vector).sum(-1)[..., None] ** 0.5
    tiny = norm == 0
    safe = xp.where(tiny, xp.ones_like(norm), norm)
    scale = xp.where(tiny, xp.zeros_like(norm), 2 * xp.arctan2(norm, q[..., :1]) / safe)
    return back(scale * vector)


def matrix_to_rot6d(matrix):
    """[..., 3, 3] -> [..., 6]: column 0, then column 1."""
    xp = np if isinstance(matrix, np.ndarray) else sys.modules["torch"]
    return xp.concatenate([matrix[..., 0], matrix[..., 1]], -1)


def axis_angle_to_rot6d(axis_angle):
    """[..., 3] in rad -> [..., 6]."""
    return matrix_to_rot6d(axis_angle_to_matrix(axis_angle))


def _degenerate(xp, c0, c1):
    """True where the columns [..., 3] do not determine a rotation: not finite, zero, or parallel."""
    n0, n1 = (c0 * c0).sum(-1) ** 0.5, (c1 * c1).sum(-1) ** 0.5
    cross = xp.linalg.cross(c0, c1)
    sine = (cross * cross).sum(-1) ** 0.5
    good = xp.isfinite(n0) & xp.isfinite(n1) & (n0 > DEGENERATE_NORM) & (n1 > DEGENERATE_NORM) & (sine > DEGENERATE_SINE * n0 * n1)
    return ~good


def rot6d_to_matrix_or_identity(rot6d):
    """[..., 6] -> ([..., 3, 3], count): the nearest rotation by SVD; degenerate 6-vectors give the identity and are counted."""
    xp, x, back = _float64(rot6d)
    _need_last(x, 6, "rot6d")
    c0, c1 = x[..., :3], x[..., 3:]
    with np.errstate(invalid="ignore", over="ignore"):  # infinities are what is looked for
        bad = _degenerate(xp, c0, c1)
    eye = xp.zeros_like(x[..., :3]), xp.zeros_like(x[..., :3])
    eye[0][..., 0], eye[1][..., 1] = 1.0, 1.0
    c0, c1 = (xp.where(bad[..., None], e, c) for e, c in zip(eye, (c0, c1), strict=True))
    u, _, vt = xp.linalg.svd(xp.stack([c0, c1, xp.linalg.cross(c0, c1)], -1))
    sign = xp.ones_like(c0)
    sign[..., 2] = xp.linalg.det(u @ vt)  # +1, or -1 where the projection would be a reflection
    return back((u * sign[..., None, :]) @ vt), int(bad.sum())


def rot6d_to_matrix(rot6d):
    """[..., 6] -> [..., 3, 3]: the nearest rotation by SVD of [c0, c1, c0 x c1].

    Raises ValueError for NaN, infinite, zero or parallel columns (`rot6d_to_matrix_or_identity` counts them instead).
    """
    matrix, bad = rot6d_to_matrix_or_identity(rot6d)
    if bad:
        raise ValueError(f"{bad} rot6d vector(s) determine no rotation: a column is zero or not finite, or the two are parallel")
    return matrix


def rot6d_to_axis_angle(rot6d):
    """[..., 6] -> [..., 3] in rad; raises as rot6d_to_matrix does."""
    return matrix_to_axis_angle(rot6d_to_matrix(rot6d))


def encode_action(action7):
    """LIBERO action [..., 7] -> [..., 10]: [dpos 3, rot6d 6, gripper 1] from [dpos 3, axis-angle 3 (rad), gripper 1].

    The gripper is the data set's: 1 = open, 0 = closed. Nothing is normalized here (common/quantile.py does that).
    """
    _need_last(action7, 7, "a LIBERO action")
    xp = np if isinstance(action7, np.ndarray) else sys.modules["torch"]
    return xp.concatenate([action7[..., :3], axis_angle_to_rot6d(action7[..., 3:6]), action7[..., 6:]], -1)


def decode_action(action10):
    """[..., 10] -> [..., 7], the inverse of encode_action on any non-degenerate rot6d; the rotation norm is at most pi."""
    _need_last(action10, 10, "an encoded action")
    xp = np if isinstance(action10, np.ndarray) else sys.modules["torch"]
    return xp.concatenate([action10[..., :3], rot6d_to_axis_angle(action10[..., 3:9]), action10[..., 9:]], -1)


def env_gripper(gripper):
    """Data set gripper (1 = open, 0 = closed) -> robosuite's command in [-1, 1] (-1 = open, +1 = close): clip(1 - 2 g)."""
    return (1 - 2 * gripper).clip(-1, 1)
