#!/bin/sh
# Install distgpt @VERSION@ from this folder, without a network: sh install.sh /path/to/venv
# For Python @PYTHON@ on @PLATFORM@. If that Python is not in PATH: PYTHON=/path/to/python sh install.sh /path/to/venv
set -eu
refuse() { echo "Error: $1" >&2; exit 2; }
[ $# -eq 1 ] || refuse "name the folder of the environment: sh install.sh /path/to/venv"
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-$(command -v python@PYTHON@ || echo python3)}
asked='import platform, sys; print("Python %d.%d on linux_%s" % (*sys.version_info[:2], platform.machine()))'
is=$("$python" -c "$asked") || refuse "$python does not run: PYTHON=/path/to/python@PYTHON@ sh install.sh $1"
[ "$is" = "Python @PYTHON@ on @PLATFORM@" ] || refuse "this is for Python @PYTHON@ on @PLATFORM@, and $python is $is"
# A slim installation removes parts of other packages, which a folder that is there already may need.
[ "@SLIM@" = no ] || [ -z "$(ls -A -- "$1" 2>/dev/null)" ] || refuse "$1 is there already: remove it, or name another folder"
echo "installing distgpt @VERSION@ into $1, which may take a minute" >&2
"$python" -m venv "$1"
# Every file's hash stands in requirements.txt. --no-deps: they are all there, and a slim bundle lacks some on purpose.
"$1/bin/python" -m pip --isolated --disable-pip-version-check install --quiet --no-index --no-deps \
    --find-links "$here/wheels" --require-hashes --requirement "$here/requirements.txt"
if [ -d "$here/tokenizers" ]; then
    mkdir -p "$1/share/distgpt"
    cp -R "$here/tokenizers" "$1/share/distgpt/"
fi
if [ "@SLIM@" = yes ]; then  # what nobody runs there; Numba and NumPy do not import their tests
    find "$1"/lib/python*/site-packages -type d -name tests -prune -exec rm -r {} +
    "$1/bin/python" -m pip --isolated --disable-pip-version-check uninstall --quiet --quiet --yes setuptools pip
fi
"$1/bin/distgpt" --version
echo "for all users, once on each kind of processor: $1/bin/distgpt compile"
