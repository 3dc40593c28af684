"""One archive with all that dev/gpu_records.py needs on a machine without git and without the internet."""

import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

from configurator import fail

REPO = Path(__file__).resolve().parent.parent
CARRIED = REPO / 'out-carried'  # where the archive has what is not the project's
MOST = 64 * 2**20  # bytes


def project_files():
    """Those that git tracks or, without git, all but .git, what runs and Python leave, and datasets."""
    try:
        command = ['git', 'ls-files', '-z']
        names = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
        found = [REPO / name for name in names.split('\0') if name]
        return [path for path in found if path.is_file()]
    except (OSError, subprocess.CalledProcessError):
        pass
    found = []
    for folder, folders, names in os.walk(REPO):
        folders[:] = [n for n in folders if not n.startswith(('.git', '.venv', 'out', '__pycache__'))]
        found += [Path(folder) / name for name in names if not name.endswith(('.bin', '.pyc', '.tar.gz'))]
    return found


def carried(name):
    """The path of a file or folder that an archive brought here, named without its endings; or None."""
    return next((str(path) for path in sorted(CARRIED.glob(f'{name}*'))), None)


def pack(path, commit, text=None, corpus=None, peer=None):
    """Write the archive; says how large it is. text, corpus: files; peer: a checkout of nanoGPT."""
    extra = {}
    for name, file in (('text', text), ('corpus', corpus)):
        if file:
            extra[name + ''.join(Path(file).suffixes)] = Path(file)
    if cache := os.environ.get('TIKTOKEN_CACHE_DIR'):
        extra.update((f'tiktoken/{file.name}', file) for file in Path(cache).iterdir() if file.is_file())
    if peer:
        extra.update((f'nanogpt/{file.name}', file) for file in Path(peer).glob('*.py'))
    part = Path(f'{path}.part')
    with tempfile.NamedTemporaryFile('w') as note, tarfile.open(part, 'w:gz') as archive:
        note.write(commit)
        note.flush()
        for file in project_files():
            archive.add(file, f'flatgpt/{file.relative_to(REPO)}')
        for name, file in {**extra, 'commit': Path(note.name)}.items():
            archive.add(file, f'flatgpt/{CARRIED.name}/{name}')
    size = part.stat().st_size
    if size > MOST:
        part.unlink()
        fail(f"the archive would be too large ({size / 2**20:.1f} MiB of {MOST / 2**20:.0f}). leave out "
             "--corpus, or give a shorter one")
    part.replace(path)
    return f'{path}: {size / 2**20:.1f} MiB, with {", ".join(sorted(extra)) or "the project alone"}'
