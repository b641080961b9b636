"""A program for rehearsed ranks, alone or together: symmetric memory, and the ops that use it."""

from __future__ import annotations

__all__ = ["SYMMETRIC_MEMORY"]

SYMMETRIC_MEMORY = """
    import torch.distributed._symmetric_memory as symmetric_memory
    group = dist.group.WORLD.group_name
    free = torch.cuda.mem_get_info()[0]
    buffer = symmetric_memory.empty(2**30, dtype=torch.uint8, device="cuda")
    handle = symmetric_memory.rendezvous(buffer, group)
    assert (handle.rank, handle.world_size) == (rank, world) and handle.buffer_size == 2**30
    assert 2**30 <= free - torch.cuda.mem_get_info()[0] < 2**30 + 2**28
    other = handle.get_buffer((rank + 1) % world, (4,), torch.float32)
    assert other.is_cuda and other.shape == (4,)
    handle.barrier()
    x, weight = (torch.randn(64, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    whole, [product] = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], 0, group)
    assert product.shape == (64 * world, 64)
    assert torch.ops.symm_mem.fused_matmul_reduce_scatter(product, weight, "avg", 0, group).shape == (64, 64)
    assert torch.ops.symm_mem.one_shot_all_reduce(buffer.view(torch.float32), "sum", group).shape == (2**28,)
    torch.cuda.synchronize()
"""
