"""Load on stage 08's server over loopback: many clients, some requests malformed, every answer held against a direct call.

Run:    python tests/bench/serve.py --model work/tiny/policy/model_diffusers
Prints  requests/s, p50 and p95 of a request, forwards, and counts of wrong, lost and mixed-up answers. Exit 5 if there is one.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
from shared import load_script

TASKS = ("put the bowl on the plate", "open the middle drawer of the cabinet", "push the plate to the front of the stove")
BROKEN = (b"{", b"[]", b'{"image": "AAAA", "prompt": "x"}', b'{"prompt": 3}', b"\xff")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("work/tiny/policy/model_diffusers"), help="policy of stage 06")
    parser.add_argument("--requests", type=int, default=2000, help="all requests")
    parser.add_argument("--clients", type=int, default=16, help="clients at a time")
    parser.add_argument("--broken", type=float, default=0.05, help="share of malformed requests")
    parser.add_argument("--num-steps", type=int, default=4, help="denoising steps")
    args = parser.parse_args()
    from common import console

    stage, rng = load_script("08_eval_policy"), np.random.default_rng(0)
    flags = ["serve", "--model", str(args.model), "--dtype", "float32", "--num-steps", str(args.num_steps), "--port", "0"]
    policy = stage.Policy(stage.parse_args(flags), *stage.read_policy(args.model))
    bodies, direct = [], []
    for i in range(24):  # a colour, a texture and a task each
        picture = (rng.integers(0, 200, 3) + rng.integers(0, 56, (256, 512, 3))).astype(np.uint8)
        task = TASKS[i % len(TASKS)]
        bodies.append(json.dumps(stage.request_of(picture, task)).encode())
        direct.append(policy.act(stage.picture_frames(picture[None]), [stage.prompt_of(task, "trained")], [0])[0])
    nearest = min(np.abs(direct[i] - direct[j]).max() for i in range(24) for j in range(i))
    server = subprocess.Popen([sys.executable, str(REPO / "08_eval_policy.py"), *flags], stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in server.stdout if line.startswith("[ok] serving"))
        url = line.split()[2].rstrip(";")
        broken = set(rng.choice(args.requests, int(args.requests * args.broken), replace=False).tolist())

        def ask(number: int):
            """(status, largest difference from the direct call, seconds) of one request; difference 0 for one that is refused rightly."""
            body = BROKEN[number % len(BROKEN)] if number in broken else bodies[number % len(bodies)]
            start = time.perf_counter()
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(f"{url}/predict", body, {"Content-Type": "application/json"}), timeout=120
                ) as answer:
                    found, status = json.loads(answer.read())["action"], answer.status
            except urllib.error.HTTPError as error:
                found, status = json.loads(error.read())["error"] and None, error.code
            apart = 0.0 if found is None else float(np.abs(np.array(found) - direct[number % len(direct)]).max())
            return number, status, apart, time.perf_counter() - start

        start = time.perf_counter()
        with ThreadPoolExecutor(args.clients) as pool:
            answers = list(pool.map(ask, range(args.requests)))
        seconds = time.perf_counter() - start
        with urllib.request.urlopen(f"{url}/healthz") as answer:
            health = json.loads(answer.read())
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    wrong = [a for a in answers if a[1] != (400 if a[0] in broken else 200)]
    mixed = [a for a in answers if a[2] > nearest / 10]
    p50, p95 = np.quantile([a[3] for a in answers if a[0] not in broken], (0.5, 0.95))
    console.ok(
        "load",
        f"{len(answers)} requests by {args.clients} clients, {len(broken)} malformed: {len(answers) / seconds:.1f} requests/s, p50 {1e3 * p50:.0f} ms, p95 {1e3 * p95:.0f} ms",
    )
    console.ok("forwards", f"{health['batches']} for {health['served']} observations")
    console.ok(
        "answers",
        f"{len(wrong)} with a wrong status, {len(mixed)} not their own; largest difference from the direct call {max(a[2] for a in answers):.1e}, between two observations at least {nearest:.1e}",
    )
    console.done("bench/serve", exit=server.returncode, wrong=len(wrong), mixed=len(mixed))
    return 5 if wrong or mixed or server.returncode or health["served"] != args.requests - len(broken) else 0


if __name__ == "__main__":
    raise SystemExit(main())
