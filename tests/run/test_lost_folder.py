"""The disk fills up while the suite runs: it goes on, says so and exits non-zero; what can be written is there."""

import json

from prometheus_client.parser import text_string_to_metric_families

from pytest_gpufleet import cli
from tests.conftest import FILES

# A limit on file sizes makes every further write fail, as a full disk does.
FILLS = """
    import resource, signal
    def test_fills():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    def test_goes_on():
        pass
"""


def test_disk_full(fleet):
    run = fleet(FILLS)
    assert run.status == 10, run.text
    assert "2 passed" in run.text
    assert "report.html could not be written: File too large" in run.text
    assert "Traceback" not in run.text
    assert "report: " not in run.text
    assert {path.name for path in run.folders[0].iterdir()} == {"evidence.jsonl", "report.txt"}
    assert f"evidence: runs/{run.folders[0].name}/evidence.jsonl" in run.text


def test_what_can_be_written_is_written(fleet):
    run = fleet("from pathlib import Path\ndef test_x(): (next(Path('runs').iterdir()) / 'report.html').mkdir()")
    (folder,) = run.folders
    assert run.status == 10, run.text
    assert {path.name for path in folder.iterdir() if path.is_file()} == FILES - {"report.html"}
    assert "report.html could not be written: Is a directory" in run.text
    assert json.loads((folder / "summary.json").read_text())["verdict"] == "REHEARSAL"


def test_prometheus_never_keeps_the_verdict_of_an_earlier_run(fleet, tmp_path):
    """It says that the run goes on, and in the end what became of it, though summary.json cannot be written."""
    file = tmp_path / "x.prom"
    file.write_text('# HELP gpufleet_verdict\ngpufleet_verdict{host="node7",verdict="ACCEPTED"} 1.0\n')
    module = f"""
    import shutil
    from pathlib import Path
    def test_meanwhile():
        shutil.copy("{file}", "meanwhile.prom")
        (folder,) = Path("runs").iterdir()
        (folder / "summary.json").mkdir()
    """
    run = fleet(module, f"--fleet-prometheus={file}")
    assert run.status == 10, run.text
    assert (run.folders[0] / "report.html").exists()
    meanwhile, afterwards = (
        {family.name: [sample.value for sample in family.samples] for family in text_string_to_metric_families(text)}
        for text in ((run.root / "meanwhile.prom").read_text(), file.read_text())
    )
    assert (meanwhile["gpufleet_running"], meanwhile["gpufleet_verdict"]) == ([1], [0, 0, 0, 0])
    assert (afterwards["gpufleet_running"], sum(afterwards["gpufleet_verdict"])) == ([0], 1)
    assert afterwards["gpufleet_exit_status"] == [10]
    (began,), (ended,) = (afterwards[f"gpufleet_run{end}_timestamp_seconds"] for end in ("", "_end"))
    assert began <= ended


def test_a_report_that_is_asked_for_elsewhere_is_a_copy(fleet, tmp_path, capsys):
    copies = {"report.html": tmp_path / "new" / "my.html", "junit.xml": tmp_path / "my.xml"}
    options = (f"--html={copies['report.html']}", f"--junitxml={copies['junit.xml']}")
    run = fleet("def test_x(): pass", *options, "-p", "no:terminal")  # which must not cost the run either
    assert run.status == 0, run.text
    for name, copy in copies.items():
        assert copy.read_bytes() == (run.folders[0] / name).read_bytes()
    assert cli.main(["verify", str(run.folders[0])]) == 0, capsys.readouterr().out
