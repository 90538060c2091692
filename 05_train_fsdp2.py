"""Train Cosmos3's generation tower on the encoded LIBERO cache with FSDP2.

Run:    python 05_train_fsdp2.py --base work/models/Cosmos3-Nano-DCP --cache work/cache --out work/run             (one GPU, or a CPU)
        torchrun --nproc-per-node 8 05_train_fsdp2.py --base work/models/Cosmos3-Nano-DCP --cache work/cache --out work/run
        add --resume to go on from the newest complete checkpoint of --out (from step 0 if there is none yet)
Reads:  BASE (a DCP of stage 03, of RLinf or cosmos-framework, or the diffusers folder), CACHE (stage 04 encode)
Writes: OUT/{args,env,policy,stats}.json, OUT/run.log, OUT/tensorboard/, OUT/checkpoints/global_step_N/ (DCP, policy.json, stats.json, COMPLETE)
Needs:  common/console.py, common/cosmos3.py, common/keys.py, common/libero.py, common/quantile.py, common/rot6d.py, common/weights.py,
        common/libero_stats_20fps.json; torch, diffusers, safetensors, pyarrow, tensorboard
Fails:  exit 3: base, cache or disk space is missing, or they do not belong together; exit 4: OUT exists; exit 5: a gradient is not finite
Next:   python 06_convert_ckpt.py --src OUT/checkpoints/global_step_N --base work/models/Cosmos3-Nano --out work/policy

The loss of step s depends on (seed, s) alone: sample ids, noise, sigma and prompt dropout come from counters, whatever the number of
ranks or the micro-batch. Weights, gradients and Adam's moments are float32, the compute is bf16.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common import console, keys, libero, quantile
from common.console import OutputExists, Precondition, VerifyFailed
from common.libero import LIBERO

STAGE = "05_train_fsdp2"
BETAS, EPS, WEIGHT_DECAY, CLIP = (0.9, 0.99), 1e-8, 0.05, 1.0  # the recipe's AdamW; weight decay on every trained tensor
LR_START = 1e-6  # factor of the first step
EMA_RATE = 0.1
CHECKPOINT_COPIES = {"weights": 4, "exp_avg": 4, "exp_avg_sq": 4, "ema": 4}  # bytes a parameter


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
    # horizon
    add("--steps", type=int, default=5000, help="optimizer steps in all")
    add("--global-batch", type=int, default=2048, help="samples per optimizer step, over all ranks")
    add("--micro-batch", type=int, default=32, help="samples per forward pass and rank")
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
    # output
    add("--save-every", type=int, default=500, help="steps between checkpoints, the last step included; 0: save nothing (for measuring)")
    add("--log-every", type=int, default=1, help="steps between log lines")
    add("--dry-run", action="store_true", help="print the plan and stop")
    add("--json", type=Path, help="write the result as JSON to this file")
    args = parser.parse_args(argv)
    for name in ("steps", "global_batch", "micro_batch", "warmup", "replicate", "log_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    for name in ("save_every", "grad_checkpoint", "seed"):
        if getattr(args, name) < 0:
            parser.error(f"--{name.replace('_', '-')} is at least 0")
    if not args.lr > 0:
        parser.error("--lr is positive")
    if args.lr_cycle <= args.warmup:
        parser.error("--lr-cycle is larger than --warmup")
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

    def batch(self, samples) -> dict:
        """CPU tensors of some samples: x0 latents bf16 and actions float32 [B, 16, channels], their noise, sigma float32 [B], prompt int64 [B]."""
        import torch

        from common import cosmos3

        latents = np.empty((len(samples), *self.shape), np.uint16)
        vision_noise = np.empty(latents.shape, np.float32)
        actions, action_noise = (np.zeros((len(samples), LIBERO.chunk, self.channels), np.float32) for _ in range(2))
        sigma, prompt = np.empty(len(samples), np.float32), np.empty(len(samples), np.int64)
        for i, sample in enumerate(samples):
            index, row = self.window(sample)
            suite = self.suites[index]
            noise = cosmos3.sample_noise(self.seed, sample, self.shape, (LIBERO.chunk, LIBERO.raw_action_dim))
            chunk = suite.actions[suite.start[row] : suite.start[row] + LIBERO.chunk]
            latents[i], vision_noise[i], sigma[i] = suite.latents[row], noise.vision, noise.sigma
            actions[i, :, : LIBERO.raw_action_dim] = self.normalizer.normalize(LIBERO.encode(chunk))
            action_noise[i, :, : LIBERO.raw_action_dim] = noise.action
            prompt[i] = 0 if noise.drop_prompt else suite.prompt[row] + int(noise.variant * suite.variants[row])
        tensors = {
            "latents": torch.from_numpy(latents).view(torch.bfloat16),
            "vision_noise": vision_noise,
            "actions": actions,
            "action_noise": action_noise,
            "sigma": sigma,
            "prompt": prompt,
        }
        return {k: v if isinstance(v, torch.Tensor) else torch.from_numpy(v) for k, v in tensors.items()}


def micro_batches(stream: Stream, first: int, args, rank: int, world: int, pin: bool):
    """This rank's micro-batches from global sample `first` on, one made ahead in a thread. A step's samples are cut into contiguous shares.

    pin: put them into page-locked memory, so that their copy to the GPU waits for nothing.
    """
    share = args.global_batch // world

    def numbers():
        step_first = first
        while True:
            for offset in range(0, share, args.micro_batch):
                yield range(step_first + rank * share + offset, step_first + rank * share + offset + args.micro_batch)
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
    """(vision loss, action loss), means over a micro-batch: what the recipe weighs with 10 each. The first latent frame is given, all actions are noisy."""
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
    vision_loss, action_loss = cosmos3.flow_loss(vision, action, *targets, clean_frames, clean_actions, LIBERO.raw_action_dim)
    return vision_loss.mean(), action_loss.mean()


# ---------------------------------------------------------------- model


def build_tower(config: dict, mesh, device, dtype, args):
    """The generation tower with float32 shards on `device`, values undefined."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from common import cosmos3

    tower = cosmos3.GenTower(cosmos3.build_transformer(config))
    tower.checkpoint_every = args.grad_checkpoint
    # Positions must stay float32, so inputs are not cast; the timestep MLP computes in float32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(tower.time_embedder, mesh=mesh, mp_policy=exact)
    for layer in tower.layers:
        if args.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(tower, mesh=mesh, mp_policy=policy)
    cosmos3.materialize(tower, device)
    wrong = [n for n, p in tower.named_parameters() if p.dtype != torch.float32 or p.device.type != device.type]
    assert not wrong, f"not a float32 shard on {device}: {wrong[:5]}"
    return tower


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
        console_rank0(f"[plan] skip {pattern}: {len(hit)} tensor(s) start fresh")
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

    def sharded(self) -> dict:
        """The average as DTensors that share its memory, for saving and loading."""
        from torch.distributed.tensor import DTensor

        self.wait()
        return {
            k: DTensor.from_local(average, self.mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
            for (k, p), average in zip(self.parameters.items(), self.averages, strict=True)
        }


# ---------------------------------------------------------------- checkpoints


def checkpoint_state(tower, optimizer, ema) -> dict:
    """One flat dict of DTensors: net.K, net_ema.K, optim.exp_avg.K, optim.exp_avg_sq.K (K canonical). Saving and loading use the same."""
    state = {}
    for key, p in canonical(tower).items():
        state[f"net.{key}"] = p.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"optim.{moment}.{key}"] = optimizer.state[p][moment]
    if ema:
        state |= {f"net_ema.{k}": t for k, t in ema.sharded().items()}
    return state


def save(args, step: int, train: dict, state: dict, policy: dict) -> Path:
    """Write global_step_N under a temporary name, rename it, mark it complete. All ranks call this."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from common import weights

    place = args.out / "checkpoints" / f"global_step_{step}"
    tmp = place.with_name(place.name + ".tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
    dist.barrier()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(tmp)))
    if dist.get_rank() == 0:
        weights.drop_metadata_path(tmp)
        shutil.copy(args.out / "stats.json", tmp / "stats.json")
        console.write_json(tmp / "policy.json", policy)
        console.write_json(tmp / "train.json", train)
        console.replace_folder(tmp, place)
        (place / "COMPLETE").touch()
    dist.barrier()
    return place


def newest_checkpoint(out: Path) -> Path | None:
    """The complete global_step_N with the largest N, or None."""
    found = {}
    for folder in (out / "checkpoints").glob("global_step_*"):
        number = re.fullmatch(r"global_step_(\d+)", folder.name)
        if number and (folder / "COMPLETE").is_file():
            found[int(number[1])] = folder
    return found[max(found)] if found else None


# ---------------------------------------------------------------- the run


def console_rank0(line: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        console.say(line)


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
    weights.check_safetensors(args.cache / "prompt_kv.safetensors")
    share, rest = divmod(args.global_batch, world)
    if rest or share % args.micro_batch or world % args.replicate:
        raise Precondition(
            "global batch = micro-batch x ranks x accumulation, and ranks a multiple of --replicate",
            f"{args.global_batch} = {args.micro_batch} x {world} x {args.global_batch / args.micro_batch / world:g}, replicate {args.replicate}",
            "change --global-batch, --micro-batch, --replicate or the number of ranks",
        )
    shapes = keys.shapes(config, sound=False)
    names = keys.trained(shapes)
    parameters = sum(math.prod(shapes[n]) for n in names)
    if config["num_hidden_layers"] == 36 and config["hidden_size"] == 4096:
        assert (len(names), parameters) == keys.NANO_TRAINED, (len(names), parameters)
    windows = {n: s["windows"] - s["val_windows"] for n, s in manifest["suites"].items()}
    copies = sum(v for k, v in CHECKPOINT_COPIES.items() if k != "ema" or args.ema != "off")
    saves = math.ceil(args.steps / args.save_every) if args.save_every else 0
    shards = world // args.replicate
    # Between two reductions a rank holds the whole model's gradients in float32 (one rank reduces at once).
    whole = parameters * 4 if shards > 1 and share > args.micro_batch else 0
    resume = find_resume(args)
    for key, value in {
        "trained": f"{len(names)} tensors, {parameters} parameters",
        "groups": ", ".join(f"lr {g['lr']:g} x {len(g['names'])} tensors" for g in keys.param_groups(names, args.lr)),
        "batch": f"{args.global_batch} = micro {args.micro_batch} x ranks {world} x accumulation {share // args.micro_batch}",
        "windows": ", ".join(f"{n} {w} ({args.steps * args.global_batch / len(windows) / w:.1f} epochs)" for n, w in windows.items()),
        "memory": f"{console.human_bytes(parameters * 16 / shards + whole)} a rank for weights, gradients and Adam, "
        f"{console.human_bytes(parameters * 4 / shards)} for EMA ({args.ema}), "
        f"{console.human_bytes((args.cache / 'prompt_kv.safetensors').stat().st_size)} for prompts; activations come on top",
        "checkpoint": f"{console.human_bytes(parameters * copies)} each, {saves} in all: {console.human_bytes(parameters * copies * saves)}",
        "from": resume or f"{source.path} ({source.kind})",
    }.items():
        console_rank0(f"[plan] {key}: {value}")
    if args.save_every:
        console.need_disk(args.out, parameters * copies, "one checkpoint")
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
    if resume:
        check_resume(resume, policy)
    return {
        "source": source,
        "config": config,
        "manifest": manifest,
        "normalizer": normalizer,
        "policy": policy,
        "resume": resume,
        "world": world,
    }


def find_resume(args) -> Path | None:
    """The checkpoint to go on from; None for a start at step 0. Raises OutputExists or Precondition for a run folder in the way."""
    newest = newest_checkpoint(args.out)
    if not args.resume:
        if args.out.exists():
            raise OutputExists("no folder at --out", f"{args.out} exists", "pass --resume to go on with it, or another --out")
        return None
    if args.resume == "latest":
        if newest is None:
            if args.out.exists() and any(args.out.iterdir()) and not (args.out / "args.json").is_file():
                raise Precondition("a run folder at --out", f"{args.out} is something else", "pass the run's folder, or a new one")
            if args.out.exists():
                console_rank0(f"[warn] resume: no complete checkpoint in {args.out}: starting at step 0")
        return newest
    place = Path(args.resume)
    missing = [n for n in ("COMPLETE", "policy.json", "train.json") if not (place / n).is_file()]
    if missing:
        raise Precondition(
            "a complete global_step_N folder", f"{place} without {', '.join(missing)}", "pass another one, or --resume alone for the newest"
        )
    if newest and read_step(newest) > read_step(place):
        raise OutputExists(
            f"no checkpoint after step {read_step(place)} in --out", f"{newest}", "pass another --out, so that the two branches do not mix"
        )
    return place


def read_step(checkpoint: Path) -> int:
    return json.loads((checkpoint / "train.json").read_text())["step"]


def check_resume(checkpoint: Path, policy: dict) -> None:
    """Raises Precondition with what differs if base, data, stats, trained set or seed are not those that the checkpoint was trained with."""
    theirs = json.loads((checkpoint / "policy.json").read_text())
    ours = json.loads(json.dumps(policy))
    for side in (theirs, ours):
        side["base"].pop("path")  # the same base may lie elsewhere
    differ = [f"{k}: {theirs.get(k)} -> {ours.get(k)}" for k in ours if ours[k] != theirs.get(k)]
    if differ:
        raise Precondition(
            f"the recipe of {checkpoint}",
            "; ".join(differ),
            "resume with the base, cache and flags that the run began with, or start a new run",
        )


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


def train(args, p: dict) -> dict:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.tensorboard import SummaryWriter

    from common import cosmos3, weights

    began = time.monotonic()
    device, rank = setup_distributed()
    world = p["world"]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    mesh = (
        init_device_mesh(device.type, (world,))
        if args.replicate == 1
        else init_device_mesh(device.type, (args.replicate, world // args.replicate), mesh_dim_names=("replicate", "shard"))
    )
    train_state = {"step": 0, "samples": 0, "ema_updates": 0}
    if p["resume"]:
        train_state = json.loads((p["resume"] / "train.json").read_text())
    tower = build_tower(p["config"], mesh, device, dtype, args)
    optimizer = make_optimizer(tower, args.lr, train_state["step"])
    if not p["resume"]:
        load_base(tower, p["source"], args.seed)
    ema = PowerEMA(tower, args.ema) if args.ema != "off" else None
    if p["resume"]:
        saved = weights.open_source(p["resume"])
        if ema and not saved.ema:
            raise Precondition("an EMA in the checkpoint", f"none in {p['resume']}", "resume with --ema off")
        dcp.load(checkpoint_state(tower, optimizer, ema), storage_reader=saved.reader())
        if ema:
            ema.updates = train_state["ema_updates"]
    prompts = load_prompts(args.cache, p["manifest"]).to(device, dtype)
    stream = Stream(args.cache, p["manifest"], p["normalizer"], p["config"]["action_dim"], args.seed)
    batches = micro_batches(stream, train_state["samples"], args, rank, world, pin=device.type == "cuda")

    # From here on the run folder is written: whatever fails to start has left nothing behind.
    log, board = console_rank0, None
    if rank == 0:
        (args.out / "checkpoints").mkdir(parents=True, exist_ok=True)
        shutil.copy(p["normalizer"].path, args.out / "stats.json")
        console.write_json(args.out / "args.json", vars(args))
        console.write_json(args.out / "env.json", environment())
        console.write_json(args.out / "policy.json", p["policy"])
        board = SummaryWriter(str(args.out / "tensorboard"), purge_step=train_state["step"] + 1)
        log_file = open(args.out / "run.log", "a")  # noqa: SIM115 (open for the whole run)

        def log(line):
            console.say(line)
            print(line, file=log_file, flush=True)

    log(f"[ok] start: {time.monotonic() - began:.1f} s, device {device}, compute {dtype}, prompts {len(prompts.length)}")
    parameters = [q for g in optimizer.param_groups for q in g["params"]]
    accumulation = args.global_batch // world // args.micro_batch
    last, last_loss = p["resume"], math.nan
    for step in range(train_state["step"], args.steps):
        step_began, waited = time.monotonic(), 0.0
        factor = lr_factor(step, args.warmup, args.lr_cycle)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * group["multiplier"] * factor
        losses = torch.zeros(2, device=device)
        for micro in range(accumulation):
            t = time.monotonic()
            batch = next(batches)
            waited += time.monotonic() - t
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            # One reduction a step; with one rank there is nothing to save by waiting, only a second copy of the gradients.
            tower.set_requires_gradient_sync(world == 1 or micro == accumulation - 1)
            vision, action = loss_of(tower, batch, prompts, p["manifest"]["fps"], dtype)
            (cosmos3.LOSS_SCALE * (vision + action) / accumulation).backward()
            losses += torch.stack([vision.detach(), action.detach()]) / accumulation
        absent = [n for n, q in tower.named_parameters() if q.grad is None]
        assert not absent, f"no gradient for {absent[:5]}"
        norm = torch.nn.utils.get_total_norm([q.grad for q in parameters])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not math.isfinite(norm.item()):  # the norm is global: all ranks see the same
            raise VerifyFailed(
                "a finite gradient",
                f"norm {norm.item()} at step {step + 1}, samples {train_state['samples']}..{train_state['samples'] + args.global_batch - 1}",
                "resume from the last checkpoint; look at the data with 04 check",
            )
        torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, norm)
        if ema:
            ema.wait()
        optimizer.step()
        optimizer.zero_grad()
        if ema:
            ema.update()
        train_state["step"] = step + 1
        train_state["samples"] += args.global_batch
        train_state["ema_updates"] = ema.updates if ema else 0

        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            dist.all_reduce(losses)
            vision, action = (losses / world).tolist()
            last_loss = cosmos3.LOSS_SCALE * (vision + action)
            seconds = time.monotonic() - step_began
            peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            scalars = {
                "train/loss": last_loss,
                "train/flow_matching_loss_vision": vision,
                "train/flow_matching_loss_action": action,
                "train/grad_norm": norm.item(),
                "train/learning_rate": args.lr
                * lr_factor(step + 1, args.warmup, args.lr_cycle),  # RLinf logs it after the scheduler's step
                "time/step": seconds,
                "time/data": waited,
                "train/samples_per_s": args.global_batch / seconds,
            } | ({"memory/peak_gib": peak} if device.type == "cuda" else {})
            log(
                f"[step] step:{step + 1}/{args.steps} loss:{last_loss:.4f} vision:{vision:.4f} action:{action:.4f} gnorm:{norm.item():.3f} lr:{scalars['train/learning_rate']:.3g} "
                f"s:{seconds:.2f} data_s:{waited:.3f} samples/s:{args.global_batch / seconds:.1f} peak_gib:{peak:.1f} eta_min:{(args.steps - step - 1) * seconds / 60:.0f}"
            )
            if board:
                for tag, value in scalars.items():
                    board.add_scalar(tag, value, step + 1)
        if args.save_every and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            t = time.monotonic()
            last = save(args, step + 1, train_state, checkpoint_state(tower, optimizer, ema), p["policy"])
            log(f"[ok] saved: {last} in {time.monotonic() - t:.1f} s")
    batches.close()
    if board:
        board.close()
        log_file.close()
    dist.destroy_process_group()
    return {"out": args.out, "step": args.steps, "loss": round(last_loss, 4), "checkpoint": last, "rank": rank}


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
    args = parse_args(argv)
    p = plan(args)
    if args.dry_run:
        return 0
    from torch.distributed.elastic.multiprocessing.errors import record

    if p["resume"] and read_step(p["resume"]) >= args.steps:
        console_rank0(f"[ok] finished: {p['resume']} is at step {read_step(p['resume'])} of {args.steps} already")
        result = {"out": args.out, "step": read_step(p["resume"]), "checkpoint": p["resume"], "rank": int(os.environ.get("RANK", "0"))}
    else:
        result = record(train)(args, p)
    if result.pop("rank") == 0:
        if result["checkpoint"]:
            verify(result, p)
        if args.json:
            console.write_json(args.json, result)
        console.done(STAGE, **result)
    return 0


if __name__ == "__main__":
    raise SystemExit(console.run_stage(STAGE, main))
