"""Kernels in the manner of Triton's tutorials and of JAX-Triton's examples, with directives added.

What these are written like: a matrix product that walks its tiles in groups and wraps at the edge,
the same as a persistent loop, attention whose loop over keys is in a helper, and the addition of
two vectors. None is written for the rewriter; only the comments are.
"""

import triton
import triton.language as tl


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.jit
def tutorial_matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    # syncopate: axis m: extent=M, tile=BLOCK_SIZE_M
    # syncopate: axis n: extent=N, tile=BLOCK_SIZE_N
    # syncopate: axis k: extent=K, tile=BLOCK_SIZE_K
    # syncopate: reads a_ptr[m, k]
    # syncopate: reads b_ptr[k, n]
    # syncopate: writes c_ptr[m, n]
    # syncopate: dispatch pid -> m=pid_m, n=pid_n
    pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    num_pid_in_group = GROUP_SIZE_M * num_pid_n
    group_id = pid // num_pid_in_group
    first_pid_m = group_id * GROUP_SIZE_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)
    pid_m = first_pid_m + ((pid % num_pid_in_group) % group_size_m)
    pid_n = (pid % num_pid_in_group) // group_size_m
    # syncopate: end dispatch

    # Rows and columns past the edge wrap round; what they give is not stored.
    offs_am = (pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    offs_bn = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + (offs_am[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)

    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    # syncopate: reduce k=k
    for k in range(0, tl.cdiv(K, BLOCK_SIZE_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_SIZE_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_SIZE_K, other=0.0)
        accumulator = tl.dot(a, b, accumulator)
        a_ptrs += BLOCK_SIZE_K * stride_ak
        b_ptrs += BLOCK_SIZE_K * stride_bk

    # syncopate: epilogue accumulator
    if ACTIVATION == "leaky_relu":
        accumulator = leaky_relu(accumulator)
    c = accumulator.to(c_ptr.dtype.element_ty)
    offs_cm = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    offs_cn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    c_ptrs = c_ptr + stride_cm * offs_cm[:, None] + stride_cn * offs_cn[None, :]
    c_mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
    tl.store(c_ptrs, c, mask=c_mask)
    # syncopate: end epilogue


@triton.jit
def _compute_pid(tile_id, num_pid_in_group, num_pid_m, GROUP_SIZE_M: tl.constexpr):
    group_id = tile_id // num_pid_in_group
    first_pid_m = group_id * GROUP_SIZE_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)
    pid_m = first_pid_m + (tile_id % group_size_m)
    pid_n = (tile_id % num_pid_in_group) // group_size_m
    return pid_m, pid_n


@triton.jit
def tutorial_persistent_matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    NUM_SMS: tl.constexpr,
):
    # syncopate: axis m: extent=M, tile=BLOCK_SIZE_M
    # syncopate: axis n: extent=N, tile=BLOCK_SIZE_N
    # syncopate: axis k: extent=K, tile=BLOCK_SIZE_K
    # syncopate: reads a_ptr[m, k]
    # syncopate: reads b_ptr[k, n]
    # syncopate: writes c_ptr[m, n]
    start_pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    k_tiles = tl.cdiv(K, BLOCK_SIZE_K)
    num_tiles = num_pid_m * num_pid_n
    offs_k_for_mask = tl.arange(0, BLOCK_SIZE_K)
    num_pid_in_group = GROUP_SIZE_M * num_pid_n

    # syncopate: tiles persistent
    for tile_id in tl.range(start_pid, num_tiles, NUM_SMS, flatten=True):
        # syncopate: dispatch tile_id -> m=pid_m, n=pid_n
        pid_m, pid_n = _compute_pid(tile_id, num_pid_in_group, num_pid_m, GROUP_SIZE_M)
        # syncopate: end dispatch
        start_m = pid_m * BLOCK_SIZE_M
        start_n = pid_n * BLOCK_SIZE_N
        offs_am = start_m + tl.arange(0, BLOCK_SIZE_M)
        offs_bn = start_n + tl.arange(0, BLOCK_SIZE_N)
        offs_am = tl.where(offs_am < M, offs_am, 0)
        offs_bn = tl.where(offs_bn < N, offs_bn, 0)

        accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
        # syncopate: reduce k=ki
        for ki in range(k_tiles):
            offs_k = ki * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
            a_ptrs = a_ptr + (offs_am[:, None] * K + offs_k[None, :])
            b_ptrs = b_ptr + (offs_k[:, None] * N + offs_bn[None, :])
            a = tl.load(a_ptrs, mask=offs_k_for_mask[None, :] < K - ki * BLOCK_SIZE_K, other=0.0)
            b = tl.load(b_ptrs, mask=offs_k_for_mask[:, None] < K - ki * BLOCK_SIZE_K, other=0.0)
            accumulator = tl.dot(a, b, accumulator)

        # syncopate: epilogue accumulator
        offs_cm = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
        offs_cn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
        c_ptrs = c_ptr + N * offs_cm[:, None] + offs_cn[None, :]
        c_mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
        c = accumulator.to(c_ptr.dtype.element_ty)
        tl.store(c_ptrs, c, mask=c_mask)
        # syncopate: end epilogue


@triton.jit
def _attend(acc, l_i, m_i, q, k_ptrs, v_ptrs, scale, N_CTX, BLOCK_N: tl.constexpr, D: tl.constexpr):
    for _ in range(0, N_CTX, BLOCK_N):
        k = tl.load(k_ptrs)
        qk = tl.dot(q, k) * scale
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.math.exp2(qk - m_ij[:, None])
        alpha = tl.math.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = tl.load(v_ptrs)
        acc = tl.dot(p.to(v.dtype), v, acc)
        m_i = m_ij
        k_ptrs += BLOCK_N * D
        v_ptrs += BLOCK_N * D
    return acc, l_i


@triton.jit
def tutorial_attention(
    Q,
    K,
    V,
    sm_scale,
    Out,
    H,
    N_CTX,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # syncopate: axis h: count=H
    # syncopate: axis m: extent=N_CTX, tile=BLOCK_M
    # syncopate: reads Q[h, m, :]
    # syncopate: reads K[h, :, :]
    # syncopate: reads V[h, :, :]
    # syncopate: writes Out[h, m, :]
    # syncopate: tiles one per program
    # syncopate: dispatch start_m, off_h -> m=start_m, h=off_h
    start_m = tl.program_id(0)
    off_h = tl.program_id(1)
    # syncopate: end dispatch
    base = off_h * N_CTX * D
    Q += base
    K += base
    V += base
    Out += base
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)
    q = tl.load(Q + offs_m[:, None] * D + offs_d[None, :])
    k_ptrs = K + offs_d[:, None] + offs_n[None, :] * D
    v_ptrs = V + offs_n[:, None] * D + offs_d[None, :]
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    scale = sm_scale * 1.44269504
    acc, l_i = _attend(acc, l_i, m_i, q, k_ptrs, v_ptrs, scale, N_CTX, BLOCK_N, D)
    # syncopate: epilogue
    acc = acc / l_i[:, None]
    tl.store(Out + offs_m[:, None] * D + offs_d[None, :], acc.to(Out.dtype.element_ty))
    # syncopate: end epilogue


@triton.jit
def example_add(x_ptr, y_ptr, length, output_ptr, BLOCK_SIZE: tl.constexpr):
    # syncopate: axis i: extent=length, tile=BLOCK_SIZE
    # syncopate: reads x_ptr[i]
    # syncopate: reads y_ptr[i]
    # syncopate: writes output_ptr[i]
    # syncopate: dispatch pid -> i=pid
    pid = tl.program_id(axis=0)
    # syncopate: end dispatch
    block_start = pid * BLOCK_SIZE
    offsets = block_start + tl.arange(0, BLOCK_SIZE)
    mask = offsets < length
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    output = x + y
    # syncopate: epilogue
    tl.store(output_ptr + offsets, output, mask=mask)
    # syncopate: end epilogue
