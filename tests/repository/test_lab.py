"""The notebooks as their readers meet them: JupyterLab in a real browser, Run All, and what a saved page keeps.

Needs chromium (Debian, Ubuntu: `apt install chromium`); without it the tests are skipped, unless FEDREPRO_NEED_BROWSER=1."""

import base64
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import websocket

from pages import cells
from toy import ROOT, until

BIN = Path(sys.executable).parent
PAGE = "nbs/01_core/01_trees.ipynb"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
WHY = f"none of {', '.join(BROWSERS)} is installed: JupyterLab is not looked at"


class Tab:
    "A page of the browser, spoken to by its debugging protocol"

    def __init__(self, address: str):
        self.socket = websocket.create_connection(address, suppress_origin=True, timeout=120)
        self.count = 0

    def call(self, method: str, **parameters) -> dict:
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": parameters}))
        while (answer := json.loads(self.socket.recv())).get("id") != self.count:
            pass  # events
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def value(self, script: str):
        "What a JavaScript expression (or the promise that it is) comes to"
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A copy of the pages: Run All and autosave must not change the repository's"
    folder = tmp_path_factory.mktemp("lab")
    junk = shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__", "_quarto.yml")
    shutil.copytree(ROOT / "nbs", folder / "nbs", ignore=junk)
    return folder


@pytest.fixture(scope="module")
def lab(folder, tmp_path_factory):
    "The address of a JupyterLab that shows `folder`, with settings of its own"
    own = tmp_path_factory.mktemp("settings")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {
        f"{name}_DIR": str(own / name)
        for name in (
            "JUPYTER_CONFIG",
            "JUPYTER_RUNTIME",
            "JUPYTERLAB_SETTINGS",
            "JUPYTERLAB_WORKSPACES",
        )
    }
    # as a person has it: with progress bars
    environment = {k: v for k, v in os.environ.items() if k != "CI"} | places
    options = [
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={folder}",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    with (
        open(own / "log", "w") as log,
        subprocess.Popen(
            [BIN / "jupyter", "lab", *options],
            stdout=log,
            stderr=log,
            env=environment | {"JUPYTER_PREFER_ENV_PATH": "1", "OMP_NUM_THREADS": "1"},
        ) as server,
    ):

        def answers():
            assert server.poll() is None, (own / "log").read_text()
            with socket.socket() as s:
                return s.connect_ex(("127.0.0.1", port)) == 0

        try:
            until(answers, 60, "JupyterLab")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    "An empty tab of a headless chromium with a profile of its own"
    if BROWSER is None:
        (pytest.fail if os.environ.get("FEDREPRO_NEED_BROWSER") == "1" else pytest.skip)(WHY)
    profile = tmp_path_factory.mktemp("profile")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={profile}",
        "--remote-debugging-port=0",
        "--window-size=1400,1000",
        "about:blank",
    ]
    with subprocess.Popen(
        [BROWSER, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as browser:
        try:
            port, path = until(
                lambda: (
                    (f := profile / "DevToolsActivePort").exists()
                    and f.read_text().split()[1:]
                    and f.read_text().split()
                ),
                30,
                "chromium",
            )
            whole = Tab(f"ws://127.0.0.1:{port}{path}")
            target = whole.call("Target.createTarget", url="about:blank")["targetId"]
            yield Tab(f"ws://127.0.0.1:{port}/devtools/page/{target}")
        finally:
            browser.terminate()


PANEL = "window.jupyterapp?.shell?.currentWidget"


def run_all(tab: Tab, lab: str, page: str) -> dict:
    "Open a page, run all its cells, wait until the kernel is idle; the notebook as it would be saved"
    tab.call("Page.navigate", url=f"{lab}/lab/workspaces/{Path(page).stem}/tree/{page}")
    until(
        lambda: tab.value(f"{PANEL}?.context?.path === '{page}' && {PANEL}.context.isReady"),
        60,
        f"{page} open",
    )
    until(
        lambda: tab.value(f"{PANEL}.sessionContext.session?.kernel?.status === 'idle'"),
        60,
        f"{page}: a kernel",
    )
    tab.value(
        f"window.ran = false; {PANEL}.sessionContext.ready.then(() => jupyterapp.commands.execute('notebook:run-all-cells'))"
        ".then(() => { window.ran = true; }); 0"
    )
    until(
        lambda: tab.value(f"window.ran && {PANEL}.sessionContext.session.kernel.status === 'idle'"),
        120,
        f"{page}: Run All",
    )
    return tab.value(f"JSON.parse(JSON.stringify({PANEL}.content.model.toJSON()))")


def test_run_all_in_jupyterlab(tab, lab):
    "Pays for JupyterLab, chromium and the cells of a short page; that all pages run is nbdev_test's"
    saved = run_all(tab, lab, PAGE)
    code = [c for c in saved["cells"] if c["cell_type"] == "code" and "".join(c["source"]).strip()]
    errors = [o for c in code for o in c["outputs"] if o["output_type"] == "error"]
    assert not errors, f"{errors[0]['ename']}: {errors[0]['evalue']}"
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1)), (
        "not every cell was run, once, in order"
    )
    assert len(code) == sum(bool(c["source"].strip()) for c in cells(ROOT / PAGE, "code"))
    debris = [
        kind for c in code for o in c["outputs"] for kind in o.get("data", {}) if "widget" in kind
    ]
    assert "widgets" not in saved["metadata"] and not debris, "a widget's state would be saved"
    title = re.match("# (.+)", "".join(saved["cells"][0]["source"]))[1]
    tab.value(f"{PANEL}.content.scrollToItem(0)")
    until(
        lambda: title in (tab.value(f"{PANEL}.node.querySelector('h1')?.textContent") or ""),
        10,
        "the title",
    )
    assert (
        len(base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"])) > 20_000
    ), "an empty page"
