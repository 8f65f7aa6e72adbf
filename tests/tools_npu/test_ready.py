"""What check_npu.py calls ready, and the files of new servers that it looks at."""

from pathlib import Path

from tools_npu import host_checks, lines
from tools_npu.lines import FAIL, PASS, SKIP, WARN, Line


def test_ready_means_that_everything_training_needs_has_passed() -> None:
    passed = [Line(f"{name} bfloat16" if " " in name else name, PASS, "", "") for name in lines.NEEDED]
    assert lines.summary(passed, "en").endswith("; ready to train")
    assert lines.summary(passed, "zh").endswith("；可以训练")
    for left_out in range(len(passed)):
        skipped = passed[left_out]._replace(status=SKIP)
        for instead in ([], [skipped]):
            lacking = [*passed[:left_out], *instead, *passed[left_out + 1 :]]
            assert lines.summary(lacking, "en").endswith(f"not shown to work: {lines.NEEDED[left_out]}")
            assert "不能训练" in lines.summary(lacking, "zh")
            assert not lines.as_json(lacking)["ready"]
    warned = [*passed, Line("disk", WARN, "", "")]
    assert lines.as_json(warned)["ready"]
    assert lines.summary([*warned, Line("driver", FAIL, "", "")], "en").endswith("; failed: driver")


def test_an_inference_card_is_called_one_and_not_broken() -> None:
    card = Line("npu:0", PASS, "", "", data={"trains": False})
    passed = [Line(name, PASS, "", "") for name in lines.NEEDED if name in ("cards", "torch", "torch_npu")]
    skipped = [Line(f"{name} float16", SKIP, "", "") for name in lines.NEEDED[4:]]
    assert lines.summary([*passed, card, *skipped], "en").endswith("chat_eval work here, training does not")
    assert lines.summary([*passed, card, *skipped], "zh").endswith("chat_eval，不能训练")
    assert not lines.as_json([*passed, card, *skipped])["ready"]
    assert "not ready to train" in lines.summary([*passed, card, *skipped[:-1]], "en")  # a check that never ran
    assert lines.summary([*passed, card, *skipped, Line("disk", FAIL, "", "")], "en").endswith("; failed: disk")
    trains = card._replace(data={"trains": True})
    assert "not ready to train" in lines.summary([*passed, trains, *skipped], "en")


def test_the_files_that_name_the_links_of_a_950_server_are_checked(tmp_path: Path) -> None:
    env = {"ASCEND_ROOT_PREFIX": str(tmp_path)}
    assert [line.status for line in host_checks.links_of_new_servers(env)] == [WARN, WARN]
    for name in ("dev/ummu", "dev/uburma", "links.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    root_info = tmp_path / "etc/hccl_rootinfo.json"
    root_info.mkdir(parents=True)  # docker makes a folder of a file that the host does not have
    (line,) = host_checks.links_of_new_servers(env)
    assert (
        line.status == FAIL
        and "cannot be read" in line.english
        and "-v /etc/hccl_rootinfo.json" in line.remedy_in("en")
    )
    root_info.rmdir()
    for text, status in (("{", FAIL), ('{"topo_file_path": "/gone.json"}', FAIL),
                         ('{"topo_file_path": "/links.json"}', PASS)):  # fmt: skip
        root_info.write_text(text)
        assert [line.status for line in host_checks.links_of_new_servers(env)] == [status]
