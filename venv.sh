# Sourced by run_all.sh and run_tests.sh: leaves a Python with requirements.txt installed as $PY.
# VENV=dir uses that virtual environment as it is; otherwise .venv is made, or made anew when requirements.txt has changed.
if [ -n "${VENV:-}" ]; then
    PY="$VENV/bin/python"
    [ -x "$PY" ] || { echo "[FAIL] venv: expected $PY; found nothing; to mend: unset VENV, or point it at a virtual environment" >&2; exit 3; }
else
    PY="$PWD/.venv/bin/python"
    if ! cmp -s requirements.txt .venv/requirements.installed; then
        command -v python3.12 >/dev/null || { echo "[FAIL] venv: expected python3.12 on the PATH; found none; to mend: install it, or set VENV" >&2; exit 3; }
        echo "[plan] venv: installing requirements.txt into .venv (about 6 GB, two to five minutes)"
        rm -rf .venv
        python3.12 -m venv .venv
        "$PY" -m pip install --quiet --disable-pip-version-check -r requirements.txt
        cp requirements.txt .venv/requirements.installed
    fi
fi
