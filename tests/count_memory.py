"""One rank of tests/test_train.py's memory count: shard a tower, load a base into it, and count what the CPU allocator held on the way.

Run under torchrun: count_memory.py OUT BASE... Rank r writes OUT/r.json: for each base the bytes of its shards, of the largest tensor, and
the peak of live bytes. The counts are the allocator's own (torch.profiler): memory that the system takes back late does not blur them.
A safetensors file that is mapped counts in full, although it occupies nothing but the page cache.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import load_script
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from common import keys, weights

train = load_script("05_train_fsdp2")
out, counts = Path(sys.argv[1]), {}
_, rank = train.setup_distributed()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for base in map(Path, sys.argv[2:]):
    source = weights.open_source(base)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        tower = train.build_tower(weights.read_config(source), mesh, torch.device("cpu"), torch.float32, train.parse_args([]))
        train.load_base(tower, source, seed=0)
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    sizes = [p.numel() * 4 for p in tower.parameters()]
    shard = sum(p.to_local().numel() * 4 for p in tower.parameters())
    warm = {k: p.full_tensor() for n, p in tower.named_parameters() for k in [keys.to_canonical(n)] if "action" not in k}
    equal = all(torch.equal(p, source.tensor(source.net[k]).float()) for k, p in warm.items())
    counts[base.name] = {"shard": shard, "whole": sum(sizes), "largest": max(sizes), "peak": peak, "equal": equal}
(out / f"{rank}.json").write_text(json.dumps(counts))
dist.destroy_process_group()
