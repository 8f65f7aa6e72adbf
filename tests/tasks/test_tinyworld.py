"""TinyWorld as tasks: names, sizes and grading."""

from nanochat.data.conversation import Task
from tasks import tinyworld


def test_the_measures_follow_the_task_protocol():
    tasks: list[Task] = [make() for make in tinyworld.measures().values()]
    names = [task.name for task in tasks]
    assert names[:3] == ["tinyworld_en", "tinyworld_zh", "calculator"]
    assert names == list(tinyworld.measures()) and names[-1] == "mental"
    assert {"held_out_combinations_en", "held_out_combinations_zh"} <= set(names)
    assert len(tasks[0]) >= 600 and len(tasks[1]) >= 600 and len(tasks[2]) >= 300
    for task in tasks:
        assert task.kind == "generative" and task.letters(0) == ()
        assert task[0].messages[-1].role == "assistant"


def test_grade_gives_one_for_the_reference_and_zero_for_nothing():
    for task in (make() for make in tinyworld.measures().values()):
        assert task.grade(0, task[0].messages[-1].parts) == 1.0
        assert task.grade(0, "") == 0.0


def test_every_problem_of_the_world_names_its_relation():
    english = tinyworld.measures()["tinyworld_en"]()
    assert len({english.group(i) for i in range(len(english))}) >= 40


def test_mental_is_measured_as_rl_measures_it():
    assert tinyworld.measures()["mental"]() == tinyworld.mental()
