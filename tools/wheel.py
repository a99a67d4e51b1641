"What a wheel carries besides the modules: papers/ as fedrepro/papers, the papers' pages and a guide as fedrepro/nbs"

from glob import glob
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.errors import FileError

CARRIED = (
    "papers/*.toml",
    "papers/*.py",
    "papers/*.csv",
    "papers/*.json",
    "papers/*/*.toml",
    "papers/*/*.csv",
    "papers/*/results/*/*.jsonl",
    "nbs/06_methods/1[0-4]_*.ipynb",
    "nbs/00_guides/01_your_method.ipynb",
)
LEFT_OUT = ("_modidx",)  # nbdev's index of the notebooks


class BuildPy(build_py):
    "Copies what CARRIED names into the package as it is built; the repository, and so an editable install, has no copy"

    def carried(self) -> dict[str, str]:
        "File of the repository -> its place in the build"
        found = {pattern: sorted(glob(pattern)) for pattern in CARRIED}
        if absent := [pattern for pattern, files in found.items() if not files]:
            raise FileError(f"a wheel needs {', '.join(absent)}, and there is no such file")
        return {
            file: str(Path(self.build_lib, "fedrepro", file))
            for files in found.values()
            for file in files
        }

    def find_package_modules(self, package, package_dir):
        return [
            found
            for found in super().find_package_modules(package, package_dir)
            if found[1] not in LEFT_OUT
        ]

    def run(self):
        super().run()
        if self.editable_mode:
            return
        for file, place in self.carried().items():
            self.mkpath(str(Path(place).parent))
            self.copy_file(file, place, preserve_mode=False)

    def get_source_files(self):
        return [*super().get_source_files(), *self.carried()]

    def get_outputs(self, include_bytecode=True):
        return [
            *super().get_outputs(include_bytecode),
            *([] if self.editable_mode else self.carried().values()),
        ]
