"""Stands in for SIM/bin/python in the tests of stage 08's closed loop: it answers common/libero_sim.py's protocol without a simulator.

The world: a point that the position commands move; the episode succeeds once it is GOAL units to the right. Initial state i shows a picture of grey 10 * i.
DEATH=n in the environment: the process ends at its n-th step request.
"""

import json
import os
import sys

import numpy as np

GOAL = 3.0
out, place, steps = sys.stdout.buffer, 0.0, 0
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "tasks":
        out.write(
            json.dumps({"tasks": ["go right", "go left"], "init_states": [3, 3], "versions": {"python": "fake"}, "pictures": 0}).encode()
            + b"\n"
        )
    else:
        if request["do"] == "reset":
            place, level, taken = 0.0, 10 * request["init"], 1
        else:
            steps += 1
            if steps == int(os.environ.get("DEATH", "0")):
                print("no display", file=sys.stderr)
                sys.exit(3)
            taken = 0
            for action in request["actions"]:
                place, taken = place + action[0], taken + 1
                if place >= GOAL:
                    break
        out.write(json.dumps({"success": place >= GOAL, "pictures": taken}).encode() + b"\n")
        out.write(np.full((taken, 256, 512, 3), level, np.uint8).tobytes())
    out.flush()
