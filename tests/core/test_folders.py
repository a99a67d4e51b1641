"How specs are named in a command that is printed"

import shlex

from fedrepro.core.folders import command, spec_path, spec_word


def test_a_spec_is_named_so_that_it_is_found_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("papers/mine/one.toml", "papers/fedccfa/table2.toml", "m y/two.toml"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    for typed, word in {
        "mine/one": "mine/one",
        "fedccfa/table2": "fedccfa/table2",  # that of the working folder
        "fedccfa/table1": "fedccfa/table1",
        "m y/two": "m y/two.toml",
        str(tmp_path / "m y/two.toml"): "m y/two.toml",
    }.items():
        path = spec_path(typed)
        assert spec_word(path) == word
        assert spec_path(word).samefile(path)
    monkeypatch.chdir(tmp_path / "m y")
    assert spec_word(spec_path("two")) == "two.toml"


def test_a_command_has_the_imported_files_and_quotes(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDREPRO_METHODS", "/a b/c.py:/d.py")
    line = command("run", tmp_path / "it's.toml", "--tier", "smoke")
    words = ["run", str(tmp_path / "it's.toml"), "--tier", "smoke"]
    assert shlex.split(line)[1:] == [*words, "--import", "/a b/c.py", "--import", "/d.py"]
