# SPDX-License-Identifier: Apache-2.0
"""Child of test_triton_rows.py: runs the row-wise kernels with TRITON_INTERPRET=1 on the CPU."""

from __future__ import annotations

import torch

from kernels.reference import activation, mla_kv_write, norm


def main() -> None:
    from kernels.triton import rows

    torch.manual_seed(1)
    x, residual = torch.randn(5, 72), torch.randn(5, 72)
    weight = torch.rand(72) + 0.5
    torch.testing.assert_close(rows.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))
    wide = torch.randn(5, 200)[:, 64:136]  # rows of a wider matrix
    found = rows.rms_norm(wide, weight, 1e-5)
    torch.testing.assert_close(found, norm.rms_norm(wide, weight, 1e-5))
    found, twice = rows.rms_norm_twice(x.to(torch.float16), weight, 1e-5)
    torch.testing.assert_close(found, norm.rms_norm(x.to(torch.float16), weight, 1e-5))
    assert twice.dtype == torch.float32 and torch.equal(twice, found.float())
    for found, expected in zip(
        rows.add_rms_norm(x, residual, weight, 1e-5),
        norm.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)
    gates = torch.randn(3, 2 * 1100)
    torch.testing.assert_close(rows.silu_and_mul(gates), activation.silu_and_mul(gates))
    q, kv = torch.randn(7, 3, 28), torch.randn(7, 100)
    angles = torch.rand(50, 6) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 50, (7,), dtype=torch.int32)
    slots = torch.randperm(4 * 16)[:7].to(torch.int32)
    results = []
    for write in (rows.mla_kv_write, mla_kv_write.mla_kv_write):
        mine, pool = q.clone(), torch.zeros(4, 2, 16, 60)
        rope, latent = mine[..., 16:], kv[:, 40:]
        write(rope, latent, torch.ones(48) * 0.7, 1e-6, positions, table, pool[:, 1], slots)
        results.append((mine, pool))
    for found, expected in zip(results[0], results[1], strict=True):
        torch.testing.assert_close(found, expected)
    print("ok")


if __name__ == "__main__":
    main()
