"""The disk fills up or the report folder goes away while the suite runs: it goes on, says so and exits non-zero."""


def test_report_folder_removed(fleet):
    module = """
    import shutil
    def test_removes():
        shutil.rmtree("runs")
    def test_goes_on(world):
        assert world.run(lambda rank: rank.index) == [0, 1]
    """
    run = fleet(module)
    assert run.status == 10, run.text
    assert "was removed while the run went on" in run.text
    assert run.outcomes == {"test_removes": "passed", "test_goes_on": "passed"}  # the evidence is whole again
    assert (run.folders[0] / "report.html").exists()


def test_disk_full(fleet):
    # A limit on file sizes makes every further write fail, as a full disk does.
    module = """
    import resource, signal
    def test_fills():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    def test_goes_on():
        pass
    """
    run = fleet(module)
    assert run.status == 10, run.text
    assert "2 passed" in run.text
    assert " ".join(run.text.split()).count("the report cannot be written") == 1
    assert "Traceback" not in run.text
    assert "/dev/null" not in run.text
    assert "report: " not in run.text
    assert [path.name for path in run.folders[0].iterdir()] == ["evidence.jsonl"]
    assert f"evidence: runs/{run.folders[0].name}/evidence.jsonl" in run.text
