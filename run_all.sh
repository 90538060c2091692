#!/usr/bin/env bash
# The whole way: machine check, models, base, data, training, conversion, curves, error on held-out episodes. One [done] line a stage; stops at the first that fails.
#
#   ./run_all.sh --tiny                     on a CPU, minutes: a random-weight Cosmos3 on 12 demonstration episodes of this repository
#   ./run_all.sh --gpus 8                   the real recipe, in work/
#   ./run_all.sh --gpus 1 --ema host -- --compile --activation-budget 0.6      what follows -- goes to stage 05 as it is
#
# In tmux, with a log that survives the terminal:
#   tmux new-session -d -s cosmos3 './run_all.sh --gpus 8 2>&1 | tee -a run_all.log'      then: tmux attach -t cosmos3
#
# Flags (defaults of the real recipe): --work DIR (work)  --gpus N (all)  --steps N (5000)  --global-batch N (2048)  --micro-batch N (32)
#   --lr X (5e-5)  --warmup N (500)  --save-every N (500)  --stride N (1)  --ema device|host|off (device)  --weights net|ema (ema)
#   --base DIR (WORK/models/Cosmos3-Nano, downloaded; a folder of yours is used as it is)  --dcp DIR (WORK/models/Cosmos3-Nano-DCP)
#   --data DIR (WORK/data)  --cache DIR (WORK/cache)  --run DIR (WORK/run)  --out DIR (WORK/policy/model_diffusers)
# Paths are relative to where you call it. A finished stage says so and is left alone; one that was finished with other settings
# stops the run (exit 4); training goes on from its newest checkpoint.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)

WORK=work GPUS=all STEPS=5000 GLOBAL=2048 MICRO=32 LR=5e-5 WARMUP=500 SAVE=500 STRIDE=1 EMA=device WEIGHTS=ema TINY='' FOR=train
BASE='' DCP='' DATA='' CACHE='' RUN='' OUT=''
if [ "${1:-}" = --tiny ]; then
    shift
    TINY=--tiny FOR=walkthrough WORK=work/tiny GPUS=1 STEPS=40 GLOBAL=8 MICRO=4 LR=2e-3 WARMUP=5 SAVE=20 STRIDE=16
    export HF_HUB_OFFLINE=1
fi
usage() { echo "[FAIL] run_all: $1" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case "$1" in
        -h|--help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
        --) shift; break ;;
        --tiny) usage "--tiny comes first, found behind other flags" ;;
        --*) [ $# -ge 2 ] || usage "$1 needs a value, or is unknown (--help lists the flags)" ;;
    esac
    case "$1" in
        --work) WORK=$2 ;; --gpus) GPUS=$2 ;; --steps) STEPS=$2 ;; --global-batch) GLOBAL=$2 ;; --micro-batch) MICRO=$2 ;; --lr) LR=$2 ;;
        --warmup) WARMUP=$2 ;; --save-every) SAVE=$2 ;; --stride) STRIDE=$2 ;; --ema) EMA=$2 ;; --weights) WEIGHTS=$2 ;; --base) BASE=$2 ;;
        --dcp) DCP=$2 ;; --data) DATA=$2 ;; --cache) CACHE=$2 ;; --run) RUN=$2 ;; --out) OUT=$2 ;;
        *) usage "unknown flag $1 (--tiny comes first; --help lists the others)" ;;
    esac
    shift 2
done
case "$GPUS" in all) ;; ''|*[!0-9]*|0) usage "--gpus is a number from 1 on, found $GPUS" ;; esac

cd_back=$PWD
cd "$HERE" && . ./venv.sh && cd "$cd_back"
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
[ "$GPUS" != all ] || GPUS=$("$PY" -c 'import torch; print(max(1, torch.cuda.device_count()))')
DCP=${DCP:-$WORK/models/Cosmos3-Nano-DCP} DATA=${DATA:-$WORK/data} CACHE=${CACHE:-$WORK/cache} RUN=${RUN:-$WORK/run} OUT=${OUT:-$WORK/policy/model_diffusers}
LAUNCH=("$PY"); [ "$GPUS" = 1 ] || LAUNCH=("$PY" -m torch.distributed.run --standalone --nproc-per-node "$GPUS")

"$PY" "$HERE/01_check_env.py" --for "$FOR" --work "$WORK"
if [ -n "$BASE" ]; then
    echo "[done] 02_cache_models out=$BASE (given by --base)"
else
    BASE=$WORK/models/Cosmos3-Nano
    "$PY" "$HERE/02_cache_models.py" download $TINY --work "$WORK"
fi
"$PY" "$HERE/03_base_to_dcp.py" --base "$BASE" --out "$DCP"
"$PY" "$HERE/04_fetch_libero.py" all $TINY --data "$DATA" --base "$BASE" --out "$CACHE" --stride "$STRIDE"
"${LAUNCH[@]}" "$HERE/05_train_fsdp2.py" --base "$DCP" --cache "$CACHE" --out "$RUN" --resume --steps "$STEPS" --global-batch "$GLOBAL" \
    --micro-batch "$MICRO" --lr "$LR" --warmup "$WARMUP" --save-every "$SAVE" --ema "$EMA" "$@"
"$PY" "$HERE/06_convert_ckpt.py" --src "$RUN/checkpoints/global_step_$STEPS" --base "$BASE" --out "$OUT" --weights "$WEIGHTS"
"$PY" "$HERE/07_read_tb.py" "$RUN" --plot "$RUN/curves.png" --csv "$RUN/scalars.csv" --force
"$PY" "$HERE/08_eval_policy.py" openloop --model "$OUT" --data "$DATA" --out "$WORK/eval/openloop"
