"""Train Cosmos3's generation tower on the encoded LIBERO cache with FSDP2.

Run:    python 05_train_fsdp2.py --base work/models/Cosmos3-Nano-DCP --cache work/cache --out work/run             (one GPU, or a CPU)
        torchrun --nproc-per-node 8 05_train_fsdp2.py --base work/models/Cosmos3-Nano-DCP --cache work/cache --out work/run
        add --resume to go on from the newest complete checkpoint of --out (from step 0 if there is none yet)
        kill -USR1 $(cat work/run/lock) saves after the step and exits 0; SIGTERM and Ctrl-C do the same
Reads:  BASE (a DCP of stage 03, of RLinf or cosmos-framework, or the diffusers folder), CACHE (stage 04 encode)
Writes: OUT/{args,env,policy,stats}.json, OUT/launches.jsonl, OUT/run.log, OUT/tensorboard/,
        OUT/checkpoints/global_step_N/ (DCP of weights and average, optim/ with Adam's moments, train.json, policy.json, stats.json, COMPLETE)
Needs:  common/budget.py, common/console.py, common/cosmos3.py, common/fp8.py, common/fp8_kernels.py (a GPU with --fp8), common/keys.py,
        common/libero.py, common/quantile.py, common/rot6d.py, common/weights.py, common/libero_stats_20fps.json; torch, diffusers, safetensors, pyarrow, tensorboard
Fails:  exit 3: base, cache or disk space is missing, they do not belong together, or another trainer is at OUT; exit 4: OUT exists;
        exit 5: too many bad steps in a row, a tensor that never moves, the last checkpoint not saved
Next:   python 06_convert_ckpt.py --src OUT/checkpoints/global_step_N --base work/models/Cosmos3-Nano --out work/policy

The loss of step s depends on (seed, s) alone: sample ids, noise, sigma and prompt dropout come from counters, whatever the number of
ranks or the micro-batch. Weights, gradients and Adam's moments are float32, the compute is bf16.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common import budget, console, keys, libero, quantile
from common.console import OutputExists, Precondition, StageError, VerifyFailed
from common.libero import LIBERO

STAGE = "05_train_fsdp2"
BETAS, EPS, WEIGHT_DECAY, CLIP = (0.9, 0.99), 1e-8, 0.05, 1.0  # the recipe's AdamW; weight decay on every trained tensor
LR_START = 1e-6  # factor of the first step
EMA_RATE = 0.1
HELD_OUT = 1 << 62  # noise of held-out window i is that of sample HELD_OUT + i, which no training sample reaches
MOVED_BY = 10  # steps after which every trained tensor must have changed
CPU_MICRO_BATCH = 8  # --micro-batch auto where there is no GPU memory to measure
# Parts of policy.json, and the average, that a resume may change when told to. The trained set is not among them: Adam has nothing for new tensors.
CHANGEABLE = ("base", "canvas", "data", "ema", "fps", "latent_shape", "prompt", "robot", "seed", "stats")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Compared with the checkpoint's at a resume, and printed; the flags win.
FLAGS_KEPT = ("lr", "warmup", "lr_cycle", "global_batch", "micro_batch", "dtype", "compile", "fp8")


def micro_batch(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number from 1 on, or auto; found {text!r}") from None


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False, formatter_class=console.HelpFormatter)
    add = parser.add_argument
    add("--base", type=Path, default=Path("work/models/Cosmos3-Nano-DCP"), help="base weights: a DCP or the diffusers folder")
    add("--cache", type=Path, default=Path("work/cache"), help="encoded cache of stage 04")
    add("--out", type=Path, default=Path("work/run"), help="run folder")
    add(
        "--resume",
        nargs="?",
        const="latest",
        help="go on from the newest complete checkpoint of --out, or from the global_step_N folder given",
    )
    add(
        "--allow-change",
        nargs="+",
        default=(),
        choices=CHANGEABLE,
        metavar="KEY",
        help=f"resume although these parts of the recipe are not the checkpoint's; KEY: {', '.join(CHANGEABLE)}",
    )
    # horizon
    add("--steps", type=int, default=5000, help="optimizer steps in all")
    add("--global-batch", type=int, default=2048, help="samples per optimizer step, over all ranks")
    add("--micro-batch", type=micro_batch, default=32, help="samples per forward pass and rank; auto: the most that fit in GPU memory")
    # optimization
    add("--lr", type=float, default=5e-5, help="peak learning rate; the action heads get five times as much")
    add("--warmup", type=int, default=500, help="steps of linear warm-up")
    add("--lr-cycle", type=int, default=16000, help="step at which the linear decay would reach zero")
    add("--ema", choices=["device", "host", "off"], default="device", help="where the fp32 moving average of the trained weights lives")
    add("--seed", type=int, default=42, help="of the sample order, the noise and the fresh action heads")
    # machine
    add("--dtype", choices=["bf16", "fp32"], help="compute dtype (default: bf16 on a GPU, fp32 on a CPU)")
    add("--replicate", type=int, default=1, help="HSDP: replicas, each sharded over world / replicate ranks")
    add("--grad-checkpoint", type=int, default=0, metavar="K", help="recompute every K-th layer in the backward pass; 0: none, 1: all")
    add("--compile", action="store_true", help="torch.compile each layer")
    add(
        "--activation-budget",
        type=float,
        default=budget.ACTIVATION_BUDGET,
        metavar="F",
        help="with --compile: share of a layer's activations to keep for the backward pass; the compiler recomputes the rest, cheapest first",
    )
    add(
        "--fp8",
        action="store_true",
        help="the layers' matrix products in float8 while training (compute capability 8.9 or later; emulated without a GPU)",
    )
    add(
        "--keep-gathered",
        action="store_true",
        help="gather each layer's weights once a step, not twice a micro-batch: 2 bytes a parameter more on each GPU",
    )
    add(
        "--max-bad-steps",
        type=int,
        default=5,
        help="steps in a row with a loss or gradient that is not finite before the run stops (exit 5)",
    )
    # held-out windows
    add("--val-every", type=int, default=500, help="steps between validations, the last step included; 0: none")
    add("--val-windows", type=int, default=256, help="held-out windows that a validation looks at, spread evenly over the suites")
    # output
    add("--keep-last", type=int, default=0, help="complete checkpoints to keep, older ones are deleted; 0: all")
    add("--keep-every", type=int, default=0, help="with --keep-last: steps whose multiples are kept as well; 0: none")
    add(
        "--slim-old",
        action="store_true",
        help="drop Adam's moments (half the bytes) from all checkpoints but the newest: they convert, but do not resume",
    )
    add("--save-every", type=int, default=500, help="steps between checkpoints, the last step included; 0: save nothing (for measuring)")
    add("--log-every", type=int, default=1, help="steps between log lines")
    add("--dry-run", action="store_true", help="print the plan and stop")
    add("--json", type=console.json_file, help="write the result as JSON to this file")
    args = parser.parse_args(argv)
    for name in ("steps", "global_batch", "micro_batch", "warmup", "replicate", "log_every", "max_bad_steps", "val_windows"):
        if getattr(args, name) != "auto" and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    for name in ("save_every", "grad_checkpoint", "seed", "val_every", "keep_last", "keep_every"):
        if getattr(args, name) < 0:
            parser.error(f"--{name.replace('_', '-')} is at least 0")
    if not 0 < args.activation_budget <= 1:
        parser.error("--activation-budget is above 0 and at most 1")
    if args.activation_budget != budget.ACTIVATION_BUDGET and not args.compile:
        parser.error("--activation-budget is for the compiler: pass --compile, or --grad-checkpoint without it")
    if not args.lr > 0:
        parser.error("--lr is positive")
    if args.lr_cycle <= args.warmup:
        parser.error("--lr-cycle is larger than --warmup")
    if args.steps > args.lr_cycle:
        parser.error(f"--steps {args.steps} goes beyond --lr-cycle {args.lr_cycle}, where the learning rate is zero")
    if args.keep_every and not args.keep_last:
        parser.error("--keep-every names exceptions to --keep-last, which is off: everything is kept already")
    if (args.keep_last or args.slim_old) and not args.save_every:
        parser.error("--keep-last and --slim-old are about checkpoints, which --save-every 0 switches off")
    return args


# ---------------------------------------------------------------- schedule and average


def lr_factor(n: int, warmup: int, cycle: int) -> float:
    """Learning-rate multiplier after n completed steps: 1e-6 rising to 1 over the warm-up, then falling linearly to 0 at `cycle`."""
    if n < warmup:
        return LR_START + (1 - LR_START) * n / warmup
    return max(0.0, (cycle - n) / (cycle - warmup))


def ema_beta(iteration: int, rate: float = EMA_RATE) -> float:
    """Weight of the old average in the power EMA at 0-based update `iteration`: (1 - 1/(i+1))**(gamma+1); 0 at the first, which copies the weights.

    gamma is the largest real root of x^3 + 7x^2 + (16 - rate^-2) x + (12 - rate^-2): 6.9372 at rate 0.1.
    """
    if iteration < 1:
        return 0.0
    roots = np.roots([1, 7, 16 - rate**-2, 12 - rate**-2])
    gamma = float(roots[np.isreal(roots)].real.max())
    return (1 - 1 / (iteration + 1)) ** (gamma + 1)


# ---------------------------------------------------------------- data


class Stream:
    """The endless training stream: global sample number -> one window with its noise, from the encoded cache.

    Suites take turns, so each gets an equal share. Inside a suite every epoch is a new permutation of its training windows.
    Nothing is stored: sample n is a function of (seed, n).
    """

    def __init__(self, cache: Path, manifest: dict, normalizer, channels: int, seed: int):
        self.suites = [libero.open_cached_suite(cache, manifest, name) for name in manifest["suites"]]
        self.train = [np.flatnonzero(s.train) for s in self.suites]
        empty = [s.name for s, rows in zip(self.suites, self.train, strict=True) if not len(rows)]
        if empty:
            raise Precondition("training windows in every suite", f"none in {', '.join(empty)}", "encode more episodes, or fewer suites")
        self.shape, self.normalizer, self.seed = tuple(manifest["latent_shape"]), normalizer, seed
        self.channels = channels  # width of the action heads; the robot's own channels come first, the rest is zero
        self.held_out: list[tuple[int, int]] = []  # (suite, row) of the validation's windows
        self._order: dict[int, tuple[int, np.ndarray]] = {}

    def window(self, sample: int) -> tuple[int, int]:
        """(suite, row of its windows) of a global sample number."""
        turn, suite = divmod(sample, len(self.suites))
        epoch, position = divmod(turn, len(self.train[suite]))
        if self._order.get(suite, (None,))[0] != epoch:
            # The top bit keeps these streams apart from the samples' noise streams, which share the seed.
            key = np.array([self.seed, 1 << 63 | suite << 32 | epoch], np.uint64)  # a plain list would round through float64
            rng = np.random.Generator(np.random.Philox(key=key))
            self._order[suite] = (epoch, rng.permutation(self.train[suite]))
        return suite, int(self._order[suite][1][position])

    def choose_held_out(self, count: int) -> None:
        """Spread `count` windows evenly over the suites and, inside each, over its held-out windows (fewer where there are not so many)."""
        for index, suite in enumerate(self.suites):
            rows = np.flatnonzero(suite.val)
            if not len(rows):
                raise Precondition("held-out windows in every suite", f"none in {suite.name}", "encode again, or pass --val-every 0")
            share = min(len(rows), math.ceil(count / len(self.suites)))
            self.held_out += [(index, int(rows[i])) for i in np.linspace(0, len(rows) - 1, share).astype(int)]

    def batch(self, samples) -> dict:
        """CPU tensors of some training samples: x0 latents bf16 and actions float32 [B, 16, channels], their noise, sigma float32 [B], prompt int64 [B]."""
        return self._tensors([(*self.window(n), n) for n in samples], dropout=True)

    def held_out_batch(self, numbers) -> dict:
        """The same of some of the chosen held-out windows, each with its own fixed noise, prompts never dropped and in their first wording."""
        return self._tensors([(*self.held_out[n], HELD_OUT + n) for n in numbers], dropout=False)

    def _tensors(self, samples: list[tuple[int, int, int]], dropout: bool) -> dict:
        """samples: (suite, row, number that keys the noise)."""
        import torch

        from common import cosmos3

        latents = np.empty((len(samples), *self.shape), np.uint16)
        vision_noise = np.empty(latents.shape, np.float32)
        actions, action_noise = (np.zeros((len(samples), LIBERO.chunk, self.channels), np.float32) for _ in range(2))
        sigma, prompt = np.empty(len(samples), np.float32), np.empty(len(samples), np.int64)
        for index, row, _ in samples:
            self.suites[index].prefetch(row)
        for i, (index, row, sample) in enumerate(samples):
            suite = self.suites[index]
            noise = cosmos3.sample_noise(self.seed, sample, self.shape, (LIBERO.chunk, LIBERO.raw_action_dim))
            chunk = suite.actions[suite.start[row] : suite.start[row] + LIBERO.chunk]
            latents[i], vision_noise[i], sigma[i] = suite.latents[row], noise.vision, noise.sigma
            actions[i, :, : LIBERO.raw_action_dim] = self.normalizer.normalize(LIBERO.encode(chunk))
            action_noise[i, :, : LIBERO.raw_action_dim] = noise.action
            prompt[i] = suite.prompt[row]
            if dropout:
                prompt[i] = 0 if noise.drop_prompt else prompt[i] + int(noise.variant * suite.variants[row])
        tensors = {
            "latents": torch.from_numpy(latents).view(torch.bfloat16),
            "vision_noise": vision_noise,
            "actions": actions,
            "action_noise": action_noise,
            "sigma": sigma,
            "prompt": prompt,
        }
        return {k: v if isinstance(v, torch.Tensor) else torch.from_numpy(v) for k, v in tensors.items()}


def micro_batches(stream: Stream, first: int, args, micro_batch: int, rank: int, world: int, pin: bool):
    """This rank's micro-batches from global sample `first` on, one made ahead in a thread. A step's samples are cut into contiguous shares.

    pin: put them into page-locked memory, so that their copy to the GPU waits for nothing.
    """
    share = args.global_batch // world

    def numbers():
        step_first = first
        while True:
            for offset in range(0, share, micro_batch):
                yield range(step_first + rank * share + offset, step_first + rank * share + offset + micro_batch)
            step_first += args.global_batch

    def make(samples):
        return {k: v.pin_memory() if pin else v for k, v in stream.batch(samples).items()}

    with ThreadPoolExecutor(1) as pool:
        source = numbers()
        ahead = pool.submit(make, next(source))
        while True:
            ready, ahead = ahead, pool.submit(make, next(source))
            yield ready.result()


def loss_of(tower, batch: dict, prompts, fps: float, dtype):
    """(vision loss, action loss), float32 [B] each: the recipe weighs their means with 10. The first latent frame is given, all actions are noisy."""
    import torch

    from common import cosmos3

    x0, a0 = batch["latents"].float(), batch["actions"]
    clean_frames = torch.zeros(x0.shape[0], x0.shape[2], dtype=torch.bool, device=x0.device)
    clean_frames[:, 0] = True
    clean_actions = torch.zeros(a0.shape[:2], dtype=torch.bool, device=a0.device)
    latents = cosmos3.add_noise(x0, batch["vision_noise"], batch["sigma"], clean_frames, 2)
    actions = cosmos3.add_noise(a0, batch["action_noise"], batch["sigma"], clean_actions, 1)
    vision, action = tower(
        latents.to(dtype), actions.to(dtype), batch["sigma"], prompts, batch["prompt"], clean_frames, clean_actions, LIBERO.domain_id, fps
    )
    targets = batch["vision_noise"] - x0, batch["action_noise"] - a0
    return cosmos3.flow_loss(vision, action, *targets, clean_frames, clean_actions, LIBERO.raw_action_dim)


# ---------------------------------------------------------------- model


class GradientMemory:
    """FSDP's reduce-scatter with its memory from the stream that trains.

    FSDP takes the reduced gradients from its own stream's pool, and freed memory does not go from one stream's pool to another's: where they are
    large (26 GiB on one GPU) and memory is short, the allocator then empties one pool for the other twice a step, with the GPU waiting.
    Safe since FSDP makes its stream wait for the training one just before it allocates, and the other way round before the gradients are used;
    and since the buffers are the gradients themselves (float32 as the weights, one reduction a step), which live until zero_grad.
    """

    def __init__(self, device):
        import torch

        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def allocate(self, size, *, dtype, device):
        import torch

        with torch.cuda.stream(self.stream):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        import torch.distributed as dist

        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def build_tower(config: dict, mesh, device, dtype, args):
    """The generation tower with float32 shards on `device`, values undefined."""
    import torch
    from torch._functorch import config as functorch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from common import cosmos3, fp8

    tower = cosmos3.GenTower(cosmos3.build_transformer(config))
    tower.checkpoint_every = args.grad_checkpoint
    if args.compile:
        functorch.activation_memory_budget = args.activation_budget
    if args.fp8:
        fp8.convert(tower.layers)
    # Positions must stay float32, so inputs are not cast; the timestep MLP computes in float32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(tower.time_embedder, mesh=mesh, mp_policy=exact)
    for layer in tower.layers:
        if args.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not args.keep_gathered)
    fully_shard(tower, mesh=mesh, mp_policy=policy)
    memory = GradientMemory(device)
    for module in sharded(tower):
        module.set_custom_reduce_scatter(memory)
    cosmos3.materialize(tower, device)
    wrong = [n for n, p in tower.named_parameters() if p.dtype != torch.float32 or p.device.type != device.type]
    assert not wrong, f"not a float32 shard on {device}: {wrong[:5]}"
    return tower


def sharded(tower) -> tuple:
    """The modules that FSDP gathers and reduces, one at a time."""
    return tower, tower.time_embedder, *tower.layers


def canonical(tower) -> dict:
    """The tower's parameters by canonical key."""
    return {keys.to_canonical(n): p for n, p in tower.named_parameters()}


def load_base(tower, source, seed: int) -> None:
    """Warm start: every rank reads its own shards of the base; the action heads start fresh (their LIBERO row of the base is untrained).

    Fresh heads: truncated normal at 3 standard deviations, std 1/sqrt(fan in); biases zero.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import distribute_tensor

    parameters = canonical(tower)
    fresh = set(keys.check_skipped(parameters))
    for pattern, hit in keys.match(keys.SKIPPED, parameters).items():
        console_rank0(f"[{'plan' if hit else 'warn'}] skip {pattern}: {len(hit)} tensor(s) start fresh")
    missing = sorted(set(parameters) - fresh - set(source.net))
    wrong = [k for k in set(parameters) - fresh - set(missing) if source.info[source.net[k]][0] != tuple(parameters[k].shape)]
    if missing or wrong:
        raise Precondition(
            f"{len(parameters) - len(fresh)} base tensors in {source.path}",
            f"{len(missing)} absent, {len(wrong)} of another shape, first {(missing + wrong)[0]}",
            "pass a Cosmos3-Nano base",
        )
    dcp.load({source.net[k]: p.detach() for k, p in parameters.items() if k not in fresh}, storage_reader=source.reader())
    config, generator = tower.config, torch.Generator().manual_seed(seed)
    std = {
        "action2llm.fc.weight": config.action_dim**-0.5,
        "llm2action.fc.weight": config.hidden_size**-0.5,
        "action_modality_embed": config.hidden_size**-0.5,
    }
    for key in sorted(fresh):
        full = torch.zeros(parameters[key].shape)
        if key in std:
            torch.nn.init.trunc_normal_(full, 0.0, std[key], -3 * std[key], 3 * std[key], generator=generator)
        p = parameters[key]
        with torch.no_grad():  # every rank drew the same values, so none needs to send them
            p.copy_(distribute_tensor(full.to(p.device), p.device_mesh, p.placements, src_data_rank=None))


def make_optimizer(tower, lr: float, steps_done: int):
    """AdamW with the recipe's two groups, its state allocated now: memory use is final before the first step, and a resume loads in place."""
    import torch

    parameters = canonical(tower)
    groups = [
        {"params": [parameters[n] for n in g["names"]], "lr": g["lr"], "multiplier": g["multiplier"]}
        for g in keys.param_groups(parameters, lr)
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
    for p in parameters.values():
        optimizer.state[p] = {
            "step": torch.tensor(float(steps_done), device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


class PowerEMA:
    """float32 average of this rank's shards, on the device or in host memory. `updates` counts and is saved with the checkpoint.

    In host memory the update runs in a thread beside the next step's forward and backward; `wait` before weights or averages are touched.
    """

    def __init__(self, tower, place: str):
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        self.parameters = canonical(tower)
        self.weights = [p.detach().to_local() for p in self.parameters.values()]
        self.averages = [w.to("cpu" if place == "host" else w.device, copy=True) for w in self.weights]
        self.mesh = next(iter(self.parameters.values())).device_mesh  # one for all
        self.stage = None
        if place == "host" and self.mesh.device_type != "cpu":
            self.mesh = init_device_mesh("cpu", tuple(self.mesh.shape), mesh_dim_names=self.mesh.mesh_dim_names)
            self.stage = torch.empty(max(w.numel() for w in self.weights), pin_memory=True)
            self.stream, self.pool, self.pending = torch.cuda.Stream(), ThreadPoolExecutor(1), None
        self.updates = 0

    def update(self) -> None:
        """Fold the weights that the optimizer has just written into the average."""
        import torch

        share = 1 - ema_beta(self.updates)
        self.updates += 1
        if self.stage is None:
            torch._foreach_lerp_(self.averages, self.weights, share)
        else:
            self.pending = self.pool.submit(self._update_host, share, torch.cuda.current_stream().record_event())

    def _update_host(self, share: float, written) -> None:
        import torch

        self.stream.wait_event(written)
        for average, weight in zip(self.averages, self.weights, strict=True):
            part = self.stage[: weight.numel()].view(weight.shape)
            with torch.cuda.stream(self.stream):
                part.copy_(weight, non_blocking=True)
            self.stream.synchronize()
            average.lerp_(part, share)

    def wait(self) -> None:
        """Until the last update is in; raises what went wrong in it."""
        if self.stage is not None and self.pending:
            self.pending.result()
            self.pending = None

    @contextlib.contextmanager
    def swapped_in(self):
        """The average in the weights' place, and the weights in the average's, bit for bit back at the end."""
        self.wait()
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for average, weight in zip(self.averages, self.weights, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def sharded(self) -> dict:
        """The average as DTensors net_ema.K that share its memory, for saving and loading."""
        from torch.distributed.tensor import DTensor

        self.wait()
        return {
            f"net_ema.{k}": DTensor.from_local(average, self.mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
            for (k, p), average in zip(self.parameters.items(), self.averages, strict=True)
        }


# ---------------------------------------------------------------- checkpoints


def model_state(tower, ema) -> dict:
    """DTensors net.K and, with an average, net_ema.K (K canonical). Saving and loading use the same."""
    state = {f"net.{key}": p.detach() for key, p in canonical(tower).items()}
    return state | (ema.sharded() if ema else {})


def optimizer_state(tower, optimizer) -> dict:
    """DTensors optim.exp_avg.K and optim.exp_avg_sq.K."""
    return {f"optim.{m}.{key}": optimizer.state[p][m] for key, p in canonical(tower).items() for m in ("exp_avg", "exp_avg_sq")}


def first_of(message: str | None) -> str | None:
    """The first rank's message that is not None, on every rank. A collective call."""
    import torch.distributed as dist

    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, message)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text), None)


def save(args, train: dict, model: dict, optim: dict, policy: dict, nbytes: int) -> Path | str:
    """Write global_step_N under a temporary name, force it to the disk, rename it, mark it complete. All ranks call this.

    Returns the folder; or, if any rank could not write (a full disk), the reason: then nothing of the attempt is left, and every
    checkpoint from before is as it was. nbytes: free space to ask for first.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from common import weights

    rank = dist.get_rank()
    place = args.out / "checkpoints" / f"global_step_{train['step']}"
    tmp = place.with_name(place.name + ".tmp")
    failure = None

    def attempt(work) -> bool:
        """Do one part of it unless an earlier one failed anywhere."""
        nonlocal failure
        raised = mine = None
        try:
            work()
        except CheckpointException as error:  # every rank gets it, with the errors of those that failed
            raised = str(error).strip()
            mine = error.failures.get(rank, (None,))[0]
        except (OSError, RuntimeError, Precondition) as error:
            mine = error
        if mine:  # with the free space, since torch's writer calls a full disk an unexpected position
            free = console.human_bytes(shutil.disk_usage(args.out).free)
            mine = f"{type(mine).__name__}: {str(mine).splitlines()[0] if str(mine) else ''} ({free} free)"
        failure = first_of(mine) or raised
        return failure is None

    def begin():
        if rank == 0:
            console.need_disk(args.out, nbytes, "one checkpoint")
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir(parents=True)

    def write():  # dcp.save forces each file to the disk; its .metadata comes last
        dcp.save(model, storage_writer=dcp.FileSystemWriter(str(tmp)))
        dcp.save(optim, storage_writer=dcp.FileSystemWriter(str(tmp / "optim")))

    def finish():
        if rank != 0:
            return
        for folder in (tmp, tmp / "optim"):
            weights.drop_metadata_path(folder)
            console.sync(folder / ".metadata")
        shutil.copy(args.out / "stats.json", tmp / "stats.json")
        console.sync(tmp / "stats.json")
        console.write_json(tmp / "policy.json", policy)
        console.write_json(tmp / "train.json", train)
        console.sync(tmp / "optim")
        console.sync(tmp)
        console.replace_folder(tmp, place)
        console.sync(place.parent)
        (place / "COMPLETE").touch()
        console.sync(place)

    if attempt(begin) and attempt(write) and attempt(finish):
        return place
    if rank == 0:
        for folder in (tmp, place):
            shutil.rmtree(folder, ignore_errors=True)
    return failure


def checkpoints(out: Path) -> list[Path]:
    """The complete global_step_N folders of a run, in the order of N."""
    found = {}
    for folder in (out / "checkpoints").glob("global_step_*"):
        number = re.fullmatch(r"global_step_(\d+)", folder.name)
        if number and (folder / "COMPLETE").is_file():
            found[int(number[1])] = folder
    return [found[n] for n in sorted(found)]


def prune(args) -> list[str]:
    """Delete what the flags do not keep, and what killed saves have left. Called when the newest checkpoint is durable; one process.

    Folders are renamed before they are deleted: a kill in between leaves no half checkpoint under a good name. Returns what was done.
    """
    done, complete = [], checkpoints(args.out)
    for folder in complete[:-1]:
        kept = not args.keep_last or folder in complete[-args.keep_last :] or (args.keep_every and read_step(folder) % args.keep_every == 0)
        if not kept:
            os.replace(folder, folder.with_name(folder.name + ".old"))
            done.append(f"deleted {folder.name}")
        elif args.slim_old and (folder / "optim").exists():
            os.replace(folder / "optim", folder.with_name(folder.name + ".optim.old"))
            done.append(f"{folder.name} without its optimizer")
    for stale in (args.out / "checkpoints").glob("global_step_*.*"):
        shutil.rmtree(stale)
    return done


# ---------------------------------------------------------------- the run


def console_rank0(line: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        console.say(line)


@contextlib.contextmanager
def lock_run(out: Path):
    """Holds a run folder's lock file, with this process' id in it. The kernel lets go of it when the process ends, also by kill -9.

    Raises Precondition if another trainer holds it.
    """
    with open(out / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise Precondition(
                f"no other trainer at {out}",
                f"process {file.read().strip()} holds {out / 'lock'}",
                "stop it first (kill -USR1 of that process saves and ends), or pass another --out",
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def forecast(args, config: dict, manifest: dict, text: int, world: int) -> tuple[dict, int, int]:
    """(what a run will take, as plan lines; bytes of one checkpoint; of all), from shapes alone. text: tokens of the longest prompt."""
    human = console.human_bytes
    shapes = keys.shapes(config, sound=False)
    names = keys.trained(shapes)
    parameters = sum(math.prod(shapes[n]) for n in names)
    if config["num_hidden_layers"] == 36 and config["hidden_size"] == 4096:
        assert (len(names), parameters) == keys.NANO_TRAINED, (len(names), parameters)
    groups = ", ".join(f"{g['lr']:g} x {len(g['names'])} tensors" for g in keys.param_groups(names, args.lr))
    share, shards = args.global_batch // world, world // args.replicate
    accumulation = (
        "accumulation, found before the first step" if args.micro_batch == "auto" else f"accumulation {share // args.micro_batch}"
    )
    windows = {n: s["windows"] - s["val_windows"] for n, s in manifest["suites"].items()}
    # Matrix products: 2 operations a weight and token forward, twice that backward; in attention every token meets those of its sample.
    _, frames, rows, columns = manifest["latent_shape"]
    tokens = frames * rows * columns // config["latent_patch_size"] ** 2 + LIBERO.chunk
    in_layers = sum(math.prod(shapes[n]) for n in names if ".layers." in n)
    attention = 2 * config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"] * tokens
    flops = 6 * args.global_batch * tokens * (in_layers + attention)
    state = budget.state_bytes(parameters, shards, share != args.micro_batch, args.ema)
    prompts = (args.cache / "prompt_kv.safetensors").stat().st_size
    activations = "activations come on top, measured before the first step"
    if args.micro_batch != "auto":
        keep = budget.kept_rows(args.compile, args.activation_budget, args.fp8)
        peak = budget.activation_bytes(config, parameters, tokens, text, args.micro_batch, args.grad_checkpoint, keep)
        peak += 2 * parameters if args.keep_gathered else 0
        activations = f"about {human(peak)} for activations in bf16: {human(state['gpu'] + state['ema'] + prompts + peak)} in all"
    nbytes = budget.checkpoint_bytes(parameters, args.ema)
    saves = math.ceil(args.steps / args.save_every) if args.save_every else 0
    in_all = nbytes * saves
    kept = f", the newest {args.keep_last} stay" if args.keep_last else ""
    return (
        {
            "trained": f"{len(names)} tensors, {parameters} parameters",
            "learning rates": groups,
            "batch": f"{args.global_batch} = micro {args.micro_batch} x ranks {world} x {accumulation}",
            "windows": ", ".join(f"{n} {w} ({args.steps * args.global_batch / len(windows) / w:.1f} epochs)" for n, w in windows.items()),
            "work": f"{args.steps} steps of {args.global_batch * tokens} tokens and {flops / 1e12:.4g} TFLOP (without recomputation)",
            "memory": f"{human(state['gpu'])} a rank for weights, gradients and Adam, {human(state['ema'])} for EMA, {human(prompts)} for prompts; {activations}",
            "host memory": f"{human(state['host'])} a rank for EMA ({args.ema})",
            "checkpoint": f"{human(nbytes)} each, {saves} in all: {human(in_all)}{kept}",
        },
        nbytes,
        in_all,
    )


def plan(args) -> dict:
    """All that can be checked before a GPU is touched: base, cache, batch arithmetic, disk. Writes nothing."""
    from common import weights

    world = int(os.environ.get("WORLD_SIZE", "1"))
    source = weights.open_source(args.base)
    config = weights.read_config(source)
    manifest = libero.read_manifest(args.cache)
    fingerprint = weights.base_fingerprint(source)
    if manifest["base_fingerprint"] != fingerprint:
        raise Precondition(
            f"a cache made with this base ({fingerprint[:12]})",
            f"{args.cache} was made with {manifest['base_fingerprint'][:12]}",
            "encode again with this base, or pass the other base",
        )
    if manifest["robot"] | {"cameras": list(LIBERO.cameras)} != LIBERO.describe():  # their keys belong to the data set
        raise Precondition("a cache of this robot description", f"another one in {args.cache}/manifest.json", "encode again")
    normalizer = quantile.load_stats(args.cache / manifest["stats"]["file"], manifest["stats"]["block"])
    if normalizer.sha256 != manifest["stats"]["sha256"]:
        raise Precondition(
            f"stats {manifest['stats']['sha256'][:12]}",
            f"{normalizer.sha256[:12]} in {normalizer.path}",
            "encode again; the file was changed after the encode",
        )
    text = max(shape[1] for shape, _, _ in weights.check_safetensors(args.cache / "prompt_kv.safetensors").values())
    share, rest = divmod(args.global_batch, world)
    micro = 1 if args.micro_batch == "auto" else args.micro_batch
    if rest or share % micro or world % args.replicate:
        raise Precondition(
            "global batch = micro-batch x ranks x accumulation, and ranks a multiple of --replicate",
            f"{args.global_batch} = {micro} x {world} x {args.global_batch / micro / world:g}, replicate {args.replicate}",
            "change --global-batch, --micro-batch, --replicate or the number of ranks",
        )
    lines, nbytes, in_all = forecast(args, config, manifest, text, world)
    resume = find_resume(args)
    lines["from"] = resume or f"{source.path} ({source.kind})"
    policy = {
        "robot": manifest["robot"],
        "canvas": manifest["canvas"],
        "latent_shape": manifest["latent_shape"],
        "fps": manifest["fps"],
        "prompt": {"system_prompt": False, "template": libero.build_prompt("TASK", 0, manifest["fps"])},
        "stats": manifest["stats"],
        "base": {"path": str(args.base), "fingerprint": fingerprint},
        "trained": list(keys.TRAINED),
        "seed": args.seed,
        "data": {
            "vae_fingerprint": manifest["vae_fingerprint"],
            "stride": manifest["stride"],
            "suites": manifest["suites"],
            "prompts_sha256": hashlib.sha256("\n".join(manifest["prompts"]).encode()).hexdigest(),
        },
    }
    train_state = {"step": 0, "samples": 0, "ema": False, "ema_updates": 0, "skipped": 0}
    if resume:
        train_state = read_state(resume)
        lines |= check_resume(resume, policy, train_state, args)
    load_ema = train_state["ema"] and args.ema != "off"
    train_state["ema"] = args.ema != "off"
    train_state["flags"] = {k: getattr(args, k) for k in FLAGS_KEPT}
    lines = [f"[plan] {key}: {value}" for key, value in lines.items()]
    for line in lines:
        console_rank0(line)
    if args.save_every:
        free = console.need_disk(args.out, nbytes, "one checkpoint")
        if in_all > free and not (resume or args.keep_last or args.slim_old):
            amounts = f"{console.human_bytes(free)} free, all checkpoints take {console.human_bytes(in_all)}"
            console_rank0(f"[warn] disk: {amounts}; saves will fail unless there is more, or --keep-last 2 is passed")
    return {
        "source": source,
        "config": config,
        "manifest": manifest,
        "normalizer": normalizer,
        "policy": policy,
        "resume": resume,
        "train_state": train_state,
        "load_ema": load_ema,
        "world": world,
        "checkpoint_bytes": nbytes,
        "lines": lines,
    }


def find_resume(args) -> Path | None:
    """The checkpoint to go on from; None for a start at step 0. Raises OutputExists or Precondition for a run folder in the way."""
    from common import weights

    if args.out.is_file():
        raise OutputExists("a run folder at --out, or nothing", f"the file {args.out}", "pass another --out")
    newest = next(reversed(checkpoints(args.out)), None)
    if not args.resume:
        if args.out.exists():
            raise OutputExists("no folder at --out", f"{args.out} exists", "pass --resume to go on with it, or another --out")
        return None
    if args.resume == "latest":
        if newest is None:
            begun = {"checkpoints", "lock", "run.log", "args.json.tmp"}  # what a run killed while it started may have left
            if args.out.exists() and not (args.out / "args.json").is_file() and {f.name for f in args.out.iterdir()} - begun:
                raise Precondition("a run folder at --out", f"{args.out} is something else", "pass the run's folder, or a new one")
            if args.out.exists():
                console_rank0(f"[warn] resume: no complete checkpoint in {args.out}: starting at step 0")
            return None
        place = newest
    else:
        place = Path(args.resume)
    others = [f"--resume {c}" for c in checkpoints(args.out) if c.resolve() != place.resolve() and (c / "optim").is_dir()]
    another = f"pass {others[-1]}" if others else "pass another one"
    missing = [n for n in ("COMPLETE", "policy.json", "train.json") if not (place / n).is_file()]
    if missing:
        raise Precondition("a complete global_step_N folder", f"{place} without {', '.join(missing)}", another)
    if not (place / "optim").is_dir():
        raise Precondition(
            "Adam's moments beside the weights",
            f"{place} without optim/ (--slim-old drops it): it can be converted, not resumed",
            another,
        )
    weights.read_dcp_metadata(place / "optim")  # the weights' own are checked when they are opened
    if read_step(place) < (read_step(newest) if newest else 0):
        raise OutputExists(
            f"no checkpoint after step {read_step(place)} in --out", f"{newest}", "pass another --out, so that the two branches do not mix"
        )
    return place


def read_state(checkpoint: Path) -> dict:
    """What train.json holds: step, samples and flags of the run. Raises Precondition where that cannot be read."""
    try:
        state = json.loads((checkpoint / "train.json").read_text())
        state["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Precondition("a readable train.json", f"{error!r} in {checkpoint}", "pass another checkpoint, or remove this one") from error
    return state


def read_step(checkpoint: Path) -> int:
    return read_state(checkpoint)["step"]


def leaves(value, prefix="") -> dict:
    """A nested dict as {"a.b.c": leaf}."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for name, inner in value.items() for k, v in leaves(inner, f"{prefix}.{name}" if prefix else name).items()}


def check_resume(checkpoint: Path, policy: dict, train_state: dict, args) -> dict:
    """Plan lines for a resume: which flags are not those of the checkpoint.

    Raises Precondition, after a table of what differs, if base, data, stats, chunk, trained set, seed or the average are not those that
    the checkpoint was trained with and --allow-change does not name them.
    """
    theirs, ours = json.loads((checkpoint / "policy.json").read_text()), json.loads(json.dumps(policy))
    before, now = (
        leaves(console.anywhere(side) | {"ema": average}) for side, average in ((theirs, train_state["ema"]), (ours, args.ema != "off"))
    )
    differ = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k)]
    refused = [k for k in differ if k.split(".")[0] not in args.allow_change]
    for k in differ:
        console_rank0(f"[{'FAIL' if k in refused else 'warn'}] resume: {k}: {before.get(k)} -> {now.get(k)}")
    if refused:
        flags = " ".join(sorted({k.split(".")[0] for k in differ} - {"trained"}))
        raise Precondition(
            f"the recipe of {checkpoint}",
            "; ".join(f"{k}: {before.get(k)} -> {now.get(k)}" for k in refused),
            "resume with the base, cache and flags that the run began with, or start a new run"
            + (f", or accept it with --allow-change {flags}" if "trained" not in refused else ""),
        )
    was, flags = train_state["flags"], {k: getattr(args, k) for k in FLAGS_KEPT}
    return {
        f"resume {k.replace('_', '-')}": f"{was[k]} in the checkpoint, {flags[k]} from now on"
        for k in FLAGS_KEPT
        if k == "lr" or was.get(k, flags[k]) != flags[k]
    }


def setup_distributed():
    """(device, rank). Under torchrun its environment decides; a plain `python` run is a world of one."""
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device, dist.get_rank()


def environment() -> dict:
    """What a later reader needs to know about the machine and the code."""
    import diffusers
    import torch

    here = Path(__file__).resolve().parent
    git = subprocess.run(["git", "-C", str(here), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "numpy": np.__version__,
        "gpus": gpus,
        "git": git.stdout.strip(),
        "argv": sys.argv,
    }


class Stop:
    """`name` is that of the first stop signal received, else None. Handlers are set explicitly: a background shell starts its jobs with Ctrl-C ignored.

    A signal only leaves its mark; the loop looks at it after each step. Repeats change nothing: launchers like to send twice.
    """

    def __init__(self):
        self.name = None

    def __call__(self, number, frame):
        if not self.name:
            self.name = signal.Signals(number).name
            # Not print: a handler may interrupt one, and Python's buffers refuse a second inside the first.
            os.write(2, f"[warn] signal: {self.name}: saving after this step, then ending\n".encode())

    @contextlib.contextmanager
    def installed(self):
        before = {s: signal.signal(s, self) for s in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def checksums(tower):
    """int64 [tensors]: the sum of every trained tensor's bits over all ranks. It changes when a tensor does."""
    import torch
    import torch.distributed as dist

    sums = torch.stack([p.detach().to_local().view(torch.int32).sum(dtype=torch.int64) for p in canonical(tower).values()])
    dist.all_reduce(sums)
    return sums


def check_moved(tower, optimizer, before) -> None:
    """Raises VerifyFailed with the names of trained tensors that have the same checksum as `before`, or that only weight decay has moved."""
    import torch
    import torch.distributed as dist

    moments = torch.stack([optimizer.state[p]["exp_avg"].to_local().count_nonzero() for p in canonical(tower).values()])
    dist.all_reduce(moments)
    rows = zip(canonical(tower), before.tolist(), checksums(tower).tolist(), moments.tolist(), strict=True)
    still = [k for k, old, new, nonzero in rows if old == new or not nonzero]
    if still:
        raise VerifyFailed(
            f"every trained tensor to move in {MOVED_BY} steps by its gradient",
            f"{len(still)} that did not: {', '.join(still[:10])}",
            "look at --lr and --warmup, and at what these tensors do in the forward pass",
        )


def most_that_fits(sizes: list[int], small: int, at_small: float, large: int, at_large: float, room: float) -> tuple[int, float]:
    """(largest of `sizes` whose peak memory is within `room`, its peak), by a line through two measured peaks; (0, peak of one) if none is."""
    slope = (at_large - at_small) / max(large - small, 1)
    chosen = max((d for d in sizes if at_small + slope * (d - small) <= room), default=0)
    return chosen, at_small + slope * (max(chosen, 1) - small)


def fit_micro_batch(tower, stream: Stream, share: int, prompts, fps: float, dtype, device, args) -> tuple[int, str]:
    """The largest divisor of a rank's share of the global batch that fits in GPU memory, and why it was chosen. All ranks call this.

    Two small sizes are tried with real samples, gradients and all; memory grows linearly with the size, so the peak of any other follows,
    and no rank has to run out of memory, which would leave the others waiting in a collective. The weights stay as they are.
    """
    import torch
    import torch.distributed as dist

    sizes = [d for d in range(1, share + 1) if share % d == 0]
    if device.type != "cuda":
        chosen = max(d for d in sizes if d <= CPU_MICRO_BATCH)
        return chosen, f"the largest divisor of {share} up to {CPU_MICRO_BATCH}; there is no GPU memory to measure"

    def peak(size: int) -> int:
        torch.cuda.reset_peak_memory_stats()
        batch = {k: v.to(device) for k, v in stream.batch(range(size)).items()}
        for last in (False, True) if share > size else (True,):
            tower.set_requires_gradient_sync(last)
            tower.set_reshard_after_backward(not args.keep_gathered or last)
            vision, action = loss_of(tower, batch, prompts, fps, dtype)
            (vision.mean() + action.mean()).backward()
        tower.zero_grad()
        return torch.cuda.max_memory_allocated()

    small, large = ([d for d in sizes if d > 1] or sizes)[:2] if len(sizes) > 2 else (sizes[0], sizes[-1])
    peak(small)  # the first pass also pays for the libraries' own buffers
    at_small, at_large = peak(small), peak(large)
    if args.compile:
        torch.compiler.reset()  # else the layers stay compiled for changing sizes
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, _ = torch.cuda.mem_get_info()
    room = budget.MEMORY_MARGIN * (free + torch.cuda.memory_reserved())
    found = torch.tensor(most_that_fits(sizes, small, at_small, large, at_large, room), device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    chosen, expected = int(found[0].item()), console.human_bytes(found[1].item())
    if not chosen:
        found = f"{expected} for one, of {console.human_bytes(room)}"
        raise Precondition("room for one sample a pass", found, "pass --grad-checkpoint 1 or --ema host, or use more GPUs")
    measured = f"peak {console.human_bytes(at_small)} at {small}, {console.human_bytes(at_large)} at {large}"
    return chosen, f"{measured}: {expected} expected, of {console.human_bytes(room)}"


def validate(tower, ema, stream: Stream, prompts, p: dict, micro: int, dtype, device) -> dict:
    """{tag: value} over the chosen held-out windows, with the averaged weights if there are any. All ranks call this; they share the windows.

    Both losses at each window's own fixed noise, then the error of action chunks sampled from noise, in the action's units.
    """
    import torch
    import torch.distributed as dist

    from common import cosmos3

    rank, world, count, fps = dist.get_rank(), dist.get_world_size(), len(stream.held_out), p["manifest"]["fps"]
    each = math.ceil(count / world)  # every rank makes as many passes; numbers beyond the last window are done again and not counted
    numbers = range(rank * each, (rank + 1) * each)
    sums = torch.zeros(5, dtype=torch.float64)
    with torch.no_grad(), ema.swapped_in() if ema else contextlib.nullcontext(), torch.compiler.set_stance("force_eager"):
        for first in range(0, each, micro):
            part = numbers[first : first + micro]
            counted = torch.tensor([n < count for n in part])
            batch = {k: v.to(device) for k, v in stream.held_out_batch([min(n, count - 1) for n in part]).items()}
            losses = [loss.double().cpu() for loss in loss_of(tower, batch, prompts, fps, dtype)]
            _, actions = cosmos3.sample_policy(
                tower,
                batch["latents"][:, :, :1].float(),
                batch["vision_noise"],
                batch["action_noise"][..., : LIBERO.raw_action_dim],
                prompts,
                batch["prompt"],
                LIBERO.domain_id,
                fps,
            )
            real = [p["normalizer"].denormalize(a.cpu().numpy()) for a in (actions, batch["actions"][..., : LIBERO.raw_action_dim])]
            errors = [torch.from_numpy(e.mean(-1)) for e in libero.action_error(*real).values()]
            sums += torch.stack([*losses, *errors])[:, counted].sum(1)
        for module in sharded(tower):  # weights that stay gathered after a forward may be the averaged ones
            module.reshard()
    dist.all_reduce(sums)
    vision, action, position, rotation, gripper = (sums / count).tolist()
    return {
        "val/loss": cosmos3.LOSS_SCALE * (vision + action),
        "val/flow_matching_loss_vision": vision,
        "val/flow_matching_loss_action": action,
        "val/position_error": position,
        "val/rotation_error_deg": rotation,
        "val/gripper_accuracy": gripper,
    }


@contextlib.contextmanager
def run_folder(args, p: dict, rank: int):
    """(log, write_scalars) of this run; on other ranks than 0 both do nothing. Only from here on is anything written to --out: a start that
    fails leaves nothing behind."""
    if rank != 0:
        yield lambda line: None, lambda scalars, step: None
        return
    from torch.utils.tensorboard import SummaryWriter

    first = p["train_state"]["step"]
    (args.out / "checkpoints").mkdir(parents=True, exist_ok=True)
    lock = contextlib.nullcontext() if p["locked"] else lock_run(args.out)
    launch = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "from_step": first, "args": vars(args), "env": environment()}
    with lock, open(args.out / "run.log", "a") as file:
        # args.json comes first: it makes this a run folder. It is what the run began with; every later launch is a line of launches.jsonl.
        for name in ("args", "env"):
            if not (args.out / f"{name}.json").is_file():
                console.write_json(args.out / f"{name}.json", launch[name])
        prune(args)
        shutil.copy(p["normalizer"].path, args.out / "stats.json")
        with open(args.out / "launches.jsonl", "a") as launches:
            launches.write(json.dumps(launch, default=str) + "\n")
        console.write_json(args.out / "policy.json", p["policy"])
        board = SummaryWriter(str(args.out / "tensorboard"), purge_step=first + 1)

        def log(line: str) -> None:
            console.say(line)
            print(line, file=file, flush=True)

        def write_scalars(scalars: dict, step: int) -> None:
            for tag, value in scalars.items():
                board.add_scalar(tag, value, step)

        print(*p["lines"], sep="\n", file=file)
        try:
            yield log, write_scalars
        except StageError as error:
            print(f"[FAIL] {error}", file=file)
            raise
        finally:
            board.close()


def train(args, p: dict) -> dict:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    from common import cosmos3, weights

    state, manifest, world = p["train_state"], p["manifest"], p["world"]
    laps, held, clock = {"plan and imports": time.monotonic() - p["began"]}, {}, time.monotonic()

    def lap(name: str) -> None:
        """One phase of the start is over: its seconds, and the GPU memory that is held after it."""
        nonlocal clock
        laps[name], clock = time.monotonic() - clock, time.monotonic()
        held[name] = torch.cuda.memory_allocated() if cuda else 0

    # ---- start: shard, load, open the cache
    device, rank = setup_distributed()
    cuda = device.type == "cuda"
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype or ("bf16" if cuda else "fp32")]
    mesh = (
        init_device_mesh(device.type, (world,))
        if args.replicate == 1
        else init_device_mesh(device.type, (args.replicate, world // args.replicate), mesh_dim_names=("replicate", "shard"))
    )
    if args.fp8 and cuda and (torch.cuda.get_device_capability() < (8, 9) or dtype is not torch.bfloat16):
        found = f"{torch.cuda.get_device_name()}, {dtype}"
        raise Precondition("for --fp8 a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell) and bf16", found, "leave --fp8 out")
    lap("process group")
    tower = build_tower(p["config"], mesh, device, dtype, args)
    lap("sharded weights")
    optimizer = make_optimizer(tower, args.lr, state["step"] - state["skipped"])
    lap("Adam")
    if p["resume"]:
        saved = weights.open_source(p["resume"])
        dcp.load(model_state(tower, None), storage_reader=saved.reader())
        dcp.load(optimizer_state(tower, optimizer), storage_reader=dcp.FileSystemReader(str(p["resume"] / "optim")))
    else:
        load_base(tower, p["source"], args.seed)
    lap("loading")
    ema = PowerEMA(tower, args.ema) if args.ema != "off" else None  # a copy of the weights
    if p["load_ema"]:
        dcp.load(ema.sharded(), storage_reader=saved.reader())
        ema.updates = state["ema_updates"]
    lap("EMA")
    prompts = load_prompts(args.cache, manifest).to(device, dtype)
    stream = Stream(args.cache, manifest, p["normalizer"], p["config"]["action_dim"], args.seed)
    if args.val_every:
        stream.choose_held_out(args.val_windows)
    lap("cache")
    micro, why = args.micro_batch, ""
    if micro == "auto":
        micro, why = fit_micro_batch(tower, stream, args.global_batch // world, prompts, manifest["fps"], dtype, device, args)
        lap("micro-batch")
    batches = micro_batches(stream, state["samples"], args, micro, rank, world, pin=cuda)
    accumulation = args.global_batch // world // micro
    parameters = [q for g in optimizer.param_groups for q in g["params"]]
    first, pace, bad_in_a_row = state["step"] + 1, [], 0
    at_start = checksums(tower) if first == 1 else None
    last, loss, failed, warned, retries = p["resume"], math.nan, None, False, math.inf

    def alloc_retries() -> int:
        """How often the allocator has had to give memory back to go on."""
        return torch.cuda.memory_stats()["num_alloc_retries"] if cuda else 0

    with run_folder(args, p, rank) as (log, write_scalars), Stop().installed() as stop:
        if why:
            log(f"[ok] micro-batch: {micro} ({why}); accumulation {accumulation}")
        seconds = ", ".join(f"{k} {v:.1f}" for k, v in laps.items())
        log(f"[ok] start: {time.monotonic() - p['began']:.1f} s ({seconds}), device {device}, compute {dtype}, process {os.getpid()}")
        for step in range(first, args.steps + 1):
            # ---- forward and backward
            step_began, waited, losses = time.monotonic(), 0.0, []
            for group in optimizer.param_groups:
                group["lr"] = args.lr * group["multiplier"] * lr_factor(step - 1, args.warmup, args.lr_cycle)
            for index in range(accumulation):
                t = time.monotonic()
                batch = next(batches)
                waited += time.monotonic() - t
                batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
                tower.set_requires_gradient_sync(index == accumulation - 1)  # one reduction a step
                tower.set_reshard_after_backward(not args.keep_gathered or index == accumulation - 1)
                vision, action = loss_of(tower, batch, prompts, manifest["fps"], dtype)
                (cosmos3.LOSS_SCALE * (vision.mean() + action.mean()) / accumulation).backward()
                losses.append(torch.stack([vision.detach(), action.detach()]))
            absent = [n for n, q in tower.named_parameters() if q.grad is None]
            assert not absent, f"no gradient for {absent[:5]}"

            # ---- what all ranks must agree on: the gradient's norm, the mean losses, whether any of them was told to stop
            norm = torch.nn.utils.get_total_norm([q.grad for q in parameters])
            norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
            losses = torch.cat(losses, 1)  # float32 [2, samples of this rank]
            shared = torch.cat([losses.mean(1) / world, losses.new_tensor([bool(stop.name)])])
            dist.all_reduce(shared)
            vision, action, stopping = shared.tolist()
            loss = cosmos3.LOSS_SCALE * (vision + action)
            good = math.isfinite(norm) and math.isfinite(loss)

            # ---- update, or skip
            if good:
                torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, torch.tensor(norm, device=device))
                if ema:
                    ema.wait()
                optimizer.step()
                if ema:
                    ema.update()
                bad_in_a_row = 0
            else:
                bad_in_a_row += 1
                state["skipped"] += 1
                what = f"loss {loss}, grad norm {norm} at step {step}; {bad_samples(stream, losses, state['samples'], args.global_batch)}"
                log(f"[warn] bad step: skipped, {bad_in_a_row} in a row, {state['skipped']} in all: {what}")
                if bad_in_a_row == args.max_bad_steps:
                    raise VerifyFailed(
                        f"fewer than {args.max_bad_steps} bad steps in a row",
                        what,
                        "resume from the last checkpoint with a smaller --lr, or look at the data with 04 check",
                    )
            optimizer.zero_grad()
            state |= {"step": step, "samples": state["samples"] + args.global_batch, "ema_updates": ema.updates if ema else 0}
            if at_start is not None and step - state["skipped"] == MOVED_BY:
                check_moved(tower, optimizer, at_start)
                log(f"[ok] moved: each of {len(at_start)} trained tensors within {MOVED_BY} steps")
                at_start = None

            # ---- log
            seconds = time.monotonic() - step_began
            pace.append(seconds)
            if step == first:
                log(f"[ok] first step: done {time.monotonic() - p['began']:.1f} s after the launch")
                log(memory_table(held, cuda))
            if len(pace) == 10:  # the first step compiles and warms up
                typical = statistics.median(pace[1:])
                log(f"[ok] pace: {typical:.2f} s a step: {(args.steps - step) * typical / 3600:.1f} h to step {args.steps}")
            if step % args.log_every == 0 or step == args.steps or not good:
                scalars = {
                    "train/loss": loss,
                    "train/flow_matching_loss_vision": vision,
                    "train/flow_matching_loss_action": action,
                    "train/grad_norm": norm,
                    "train/learning_rate": args.lr * lr_factor(step, args.warmup, args.lr_cycle),  # as RLinf: after the scheduler's step
                    "time/step": seconds,
                    "time/data": waited,
                    "train/samples_per_s": args.global_batch / seconds,
                }
                peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
                if alloc_retries() > retries:
                    log(
                        "[warn] memory: so full that the GPU waits for the allocator to make room; a smaller --activation-budget or --micro-batch leaves it some"
                    )
                    warned = True
                scalars |= ({"memory/peak_gib": peak} if cuda else {}) | ({} if good else {"train/skipped_steps": state["skipped"]})
                write_scalars(scalars, step)
                log(
                    f"[step] step:{step}/{args.steps} loss:{loss:.4f} vision:{vision:.4f} action:{action:.4f} gnorm:{norm:.3f} "
                    f"lr:{scalars['train/learning_rate']:.3g} s:{seconds:.2f} data_s:{waited:.3f} samples/s:{args.global_batch / seconds:.1f} "
                    f"peak_gib:{peak:.1f} eta_min:{(args.steps - step) * seconds / 60:.0f}"
                )

            # ---- validate, save, stop
            if args.val_every and not stopping and (step % args.val_every == 0 or step == args.steps):
                t = time.monotonic()
                found = validate(tower, ema, stream, prompts, p, micro, dtype, device)
                write_scalars(found, step)
                values = " ".join(f"{tag.removeprefix('val/')}:{value:.4f}" for tag, value in found.items())
                who = "average" if ema else "weights"
                log(f"[ok] val: step:{step} {who} on {len(stream.held_out)} windows: {values} s:{time.monotonic() - t:.1f}")
            if args.save_every and (step % args.save_every == 0 or step == args.steps or stopping):
                t = time.monotonic()
                saved = save(args, state, model_state(tower, ema), optimizer_state(tower, optimizer), p["policy"], p["checkpoint_bytes"])
                failed = saved if isinstance(saved, str) else None
                if failed:
                    log(f"[FAIL] save: step {step}: {failed}; nothing of it is left, the newest checkpoint is {last}, the run goes on")
                else:
                    last = saved
                    size, optim = (
                        console.human_bytes(sum(f.stat().st_size for f in last.rglob(n))) for n in ("*.distcp", "optim/*.distcp")
                    )
                    log(f"[ok] saved: {last}, {size}, {optim} of it the optimizer, in {time.monotonic() - t:.1f} s")
                    for line in prune(args) if rank == 0 else ():
                        log(f"[ok] pruned: {line}")
                    stopping = stopping or first_of(stop.name)  # a signal during the save needs no further step
            retries = math.inf if warned else alloc_retries()  # those of validating and saving do not count
            if stopping:
                log(f"[ok] stopped: {stop.name or 'signal to another rank'} at step {step}; --resume goes on")
                break
        if failed:
            raise VerifyFailed("the last checkpoint saved", f"{failed}; the newest is {last}", "free some space, then --resume")
    batches.close()
    dist.destroy_process_group()
    return {"out": args.out, "step": state["step"], "loss": round(loss, 4), "checkpoint": last}


def bad_samples(stream: Stream, losses, first: int, global_batch: int) -> str:
    """Which samples of a step have a loss that is not finite, from all ranks: global sample numbers with suite and window. A collective call.

    losses: [2, samples of this rank]; first: the step's first sample.
    """
    import torch
    import torch.distributed as dist

    mine = torch.nonzero(~losses.isfinite().all(0))[:, 0] + first + dist.get_rank() * losses.shape[1]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine.tolist())
    bad = [n for part in everyone for n in part]
    named = [f"{n} ({stream.suites[s].name} window {row})" for n in bad[:8] for s, row in [stream.window(n)]]
    which = f"{len(bad)} with a loss that is not finite: {', '.join(named)}{', ...' * (len(bad) > 8)}" if bad else "each with a finite loss"
    return f"samples {first}..{first + global_batch - 1}, {which}"


def memory_table(held: dict, cuda: bool) -> str:
    """One line: what each phase of the start added on the GPU, the peak of the first step, and the process' largest host memory."""
    import torch

    host = f"host peak {console.human_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}"
    if not cuda:
        return f"[ok] memory: {host}"
    after = [0, *held.values()]
    parts = [f"{name} {console.human_bytes(b - a)}" for name, a, b in zip(held, after, after[1:], strict=False) if b > a]
    peak, reserved = (console.human_bytes(n) for n in (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    return f"[ok] memory: GPU: {', '.join(parts)}, peak of the first step {peak}, reserved {reserved}; {host}"


def load_prompts(cache: Path, manifest: dict):
    """prompt_kv.safetensors of the cache as one padded PromptKV on the CPU."""
    from safetensors.torch import load_file

    from common import cosmos3

    tensors = load_file(cache / "prompt_kv.safetensors")
    return cosmos3.PromptKV.pad([(tensors[f"k.{i}"], tensors[f"v.{i}"]) for i in range(len(manifest["prompts"]))])


def verify(result: dict, p: dict) -> None:
    """The last checkpoint is complete, holds every trained tensor and, unless switched off, its average."""
    from common import weights

    source = weights.open_source(result["checkpoint"])
    names = set(keys.trained(keys.shapes(p["config"], sound=False)))
    if set(source.net) != names or (source.ema and set(source.ema) != names):
        raise VerifyFailed(
            f"{len(names)} trained tensors",
            f"{len(source.net)} and {len(source.ema)} averages in {result['checkpoint']}",
            "resume from the checkpoint before",
        )
    console.ok("verify", f"{result['checkpoint']} holds {len(source.net)} weights and {len(source.ema)} averages")


def main(argv=None) -> int:
    began = time.monotonic()
    args = parse_args(argv)
    rank0 = int(os.environ.get("RANK", "0")) == 0
    # Read when torch first allocates on a GPU. On a card that is nearly full, the allocator's unused pieces of blocks do not fit otherwise.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    locked = bool(args.resume) and rank0 and not args.dry_run and (args.out / "args.json").is_file()
    with lock_run(args.out) if locked else contextlib.nullcontext():  # before the newest checkpoint is looked up
        p = plan(args) | {"locked": locked, "began": began}
        if args.dry_run:
            return 0
        from torch.distributed.elastic.multiprocessing.errors import record

        if p["resume"] and read_step(p["resume"]) >= args.steps:
            console_rank0(f"[ok] finished: {p['resume']} is at step {read_step(p['resume'])} of {args.steps} already")
            result = {"out": args.out, "step": read_step(p["resume"]), "checkpoint": p["resume"]}
        else:
            result = record(train)(args, p)
    if rank0:
        if result["checkpoint"]:
            verify(result, p)
        if args.json:
            console.write_json(args.json, result)
        console.done(STAGE, **result)
    return 0


if __name__ == "__main__":
    raise SystemExit(console.run_stage(STAGE, main))
