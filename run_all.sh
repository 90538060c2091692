#!/usr/bin/env bash
# The whole way: machine check, models, base, data, training, conversion, curves. One [done] line a stage; stops at the first that fails.
#
#   ./run_all.sh --tiny                                  on a CPU, minutes: a random-weight Cosmos3 on 12 demonstration episodes of this repository
#   ./run_all.sh --gpus 8                                the real recipe, in work/
#
# In tmux, with a log that survives the terminal:
#   tmux new-session -d -s cosmos3 './run_all.sh --gpus 8 2>&1 | tee -a run_all.log'      then: tmux attach -t cosmos3
#
# Flags (defaults of the real recipe): --work DIR (work)  --gpus N (all)  --steps N (5000)  --global-batch N (2048)  --micro-batch N (32)
#   --lr X (5e-5)  --warmup N (500)  --save-every N (500)  --stride N (1)  --ema device|host|off (device)  --weights net|ema (ema)
#   --base DIR (WORK/models/Cosmos3-Nano)  --data DIR (WORK/data)  --cache DIR (WORK/cache)  --run DIR (WORK/run)  --out DIR (WORK/policy/model_diffusers)
# Finished stages are skipped on a rerun; training goes on from its newest checkpoint.
set -euo pipefail
cd "$(dirname "$0")"

WORK= GPUS= STEPS=5000 GLOBAL=2048 MICRO=32 LR=5e-5 WARMUP=500 SAVE=500 STRIDE=1 EMA=device WEIGHTS=ema TINY=
BASE= DATA= CACHE= RUN= OUT=
if [ "${1:-}" = --tiny ]; then
    shift
    TINY=--tiny WORK=work/tiny STEPS=40 GLOBAL=8 MICRO=4 LR=2e-3 WARMUP=5 SAVE=20 STRIDE=16
fi
while [ $# -gt 0 ]; do
    case "$1" in
        -h|--help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
        --work|--gpus|--steps|--global-batch|--micro-batch|--lr|--warmup|--save-every|--stride|--ema|--weights|--base|--data|--cache|--run|--out)
            [ $# -ge 2 ] || { echo "[FAIL] run_all: $1 needs a value" >&2; exit 2; } ;;
        *) echo "[FAIL] run_all: unknown flag $1 (--tiny comes first; --help lists the others)" >&2; exit 2 ;;
    esac
    case "$1" in
        --work) WORK=$2 ;; --gpus) GPUS=$2 ;; --steps) STEPS=$2 ;; --global-batch) GLOBAL=$2 ;; --micro-batch) MICRO=$2 ;; --lr) LR=$2 ;;
        --warmup) WARMUP=$2 ;; --save-every) SAVE=$2 ;; --stride) STRIDE=$2 ;; --ema) EMA=$2 ;; --weights) WEIGHTS=$2 ;; --base) BASE=$2 ;;
        --data) DATA=$2 ;; --cache) CACHE=$2 ;; --run) RUN=$2 ;; --out) OUT=$2 ;;
    esac
    shift 2
done
WORK=${WORK:-work}
BASE=${BASE:-$WORK/models/Cosmos3-Nano} DATA=${DATA:-$WORK/data} CACHE=${CACHE:-$WORK/cache} RUN=${RUN:-$WORK/run} OUT=${OUT:-$WORK/policy/model_diffusers}
DCP=$WORK/models/Cosmos3-Nano-DCP

. ./venv.sh
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
[ -n "$TINY" ] && export HF_HUB_OFFLINE=1
[ -n "$GPUS" ] || GPUS=$("$PY" -c 'import torch; print(max(1, torch.cuda.device_count()))')
FOR=train; [ -n "$TINY" ] && FOR=walkthrough

# A finished output is a finished stage: say so instead of failing on it.
skip() { echo "[done] $1 out=$2 (finished before)"; }

"$PY" 01_check_env.py --for $FOR --work "$WORK"
"$PY" 02_cache_models.py download $TINY --work "$WORK"
if [ -d "$DCP" ]; then skip 03_base_to_dcp "$DCP"; else "$PY" 03_base_to_dcp.py --base "$BASE" --out "$DCP"; fi
if [ -f "$CACHE/COMPLETE" ]; then skip 04_fetch_libero "$CACHE"; else "$PY" 04_fetch_libero.py all $TINY --data "$DATA" --base "$BASE" --out "$CACHE" --stride "$STRIDE"; fi

if [ -f "$RUN/checkpoints/global_step_$STEPS/COMPLETE" ]; then
    skip 05_train_fsdp2 "$RUN"
else
    RESUME=; [ -d "$RUN" ] && RESUME=--resume
    LAUNCH=("$PY"); [ "$GPUS" -gt 1 ] && LAUNCH=("$PY" -m torch.distributed.run --standalone --nproc-per-node "$GPUS")
    "${LAUNCH[@]}" 05_train_fsdp2.py --base "$DCP" --cache "$CACHE" --out "$RUN" --steps "$STEPS" --global-batch "$GLOBAL" --micro-batch "$MICRO" \
        --lr "$LR" --warmup "$WARMUP" --save-every "$SAVE" --ema "$EMA" $RESUME
fi
if [ -f "$OUT/COMPLETE" ]; then skip 06_convert_ckpt "$OUT"; else "$PY" 06_convert_ckpt.py --src "$RUN/checkpoints/global_step_$STEPS" --base "$BASE" --out "$OUT" --weights "$WEIGHTS"; fi
"$PY" 07_read_tb.py "$RUN" --plot "$RUN/curves.png" --csv "$RUN/scalars.csv" --force
