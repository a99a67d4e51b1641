"What many tests share: commands that run in the test's process"
import pytest


@pytest.fixture
def said(capsys, monkeypatch):
    "(exit code, stdout, stderr) of a command, run here, and by one worker unless it asks for more"
    from fedrepro.cli.main import main
    for place in ("executors.executors", "experiments.cluster"): monkeypatch.setattr(f"fedrepro.{place}.cores", lambda: 1)
    def said(*argv):
        code = main([str(a) for a in argv])
        return code, *capsys.readouterr()
    return said


@pytest.fixture
def refused(said):
    "Runs a command that must be refused: exit code 2, nothing on stdout, one line on stderr that has all the words"
    def refused(argv, *words):
        code, out, err = said(*argv)
        assert (code, out) == (2, "") and len(err.splitlines()) == 1 and err.startswith("fedrepro: "), (argv, code, out, err)
        for word in words: assert word in err, (word, err)
    return refused
