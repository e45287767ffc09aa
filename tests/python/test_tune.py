"""The search for schedules: which there are, how it decides (with times that a test makes up), and what is kept."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from engines import feature_sets

import deplo
from deplo import calibration, tune
from deplo.backend import collect_records
from deplo.capture import capture
from deplo.cli import main
from deplo.core import core
from deplo.options import read_options
from deplo.tune_runner import Programs


@pytest.fixture(autouse=True)
def folder(winners):
    return winners


def tasks_of(fn, *inputs, dynamic=None, **given):
    """The tasks of the one graph of fn, and the options that it is compiled with."""
    (record,) = capture(fn, list(inputs), options=read_options(), dynamic=dynamic)
    options = read_options(options=given).to_json(record.hints, record.kind != "inference")
    return tune.tasks_of(record.torch_ir, options), options


def directions(task, schedule=None, wide=False):
    found = json.loads(core().tuning_directions(task.text, task.version, schedule or task.usual, wide, task.options))
    return {direction["name"]: direction["schedules"] for direction in found}


class FakeRunner:
    """Programs are texts of schedules, and their times what `cost` says."""

    def __init__(self, cost, races=10**9):
        self.cost, self.races, self.made, self.raced = cost, races, [], set()

    def make(self, schedules):
        self.made += schedules
        return list(schedules)

    def race(self, programs, patient=False):
        self.races -= 1
        if self.races < 0:
            raise KeyboardInterrupt
        self.raced.update(programs)
        return [self.cost(program) for program in programs]


def number(text, word):
    match = re.search(rf"{re.escape(word)}=(\d+)", text)
    return int(match[1]) if match else 0


def small_chunks(text):
    """Fastest with pieces of 2048 operations."""
    return 1.0 + abs(number(text, "work") - 2048) / 1e5


def longest_sum(text, k):
    tile = min(k, number(text, "tile(r0.k0"))
    if "parts=" in text:  # a matrix unit adds pairs, tile after tile, to chains of up to 1024
        chain = min(k, max(1, 1024 // tile) * tile)
        return chain // 2 + -(-k // chain)
    chain = min(tile, number(text, "chain(r0.k0") or tile)
    return chain + -(-tile // chain) + -(-k // tile)


def test_candidates_differ_in_one_decision_and_sum_in_chains_as_short():
    (task,), _ = tasks_of(torch.nn.Linear(3584, 200), torch.randn(40, 3584))
    most = max(longest_sum(text, 3584) for text in task.proposals)
    found = directions(task, wide=True)
    assert {"tile(r0.k0)", "register_block", "unroll(r0.k0)", "work"} <= found.keys()
    every = [text for schedules in found.values() for text in schedules]
    assert len(every) > 50 and all(longest_sum(text, 3584) <= most for text in every)
    assert len({number(text, "tile(r0.k0") for text in found["tile(r0.k0)"]}) > 5
    assert all(re.sub(r"work=\d+", "", text) == re.sub(r"work=\d+", "", task.usual) for text in found["work"])


torch.manual_seed(0)
CASES = {
    "linear": (torch.nn.Linear(300, 70), (torch.randn(20, 300),)),
    "convolution": (torch.nn.Conv2d(16, 16, 3, padding=1), (torch.randn(1, 16, 12, 12),)),
    "softmax": (torch.nn.Softmax(-1), (torch.randn(24, 200),)),
    "column sums": (lambda x: x.sum(0), (torch.randn(200, 48),)),
    "transpose": (lambda x: x.t().contiguous() * 2, (torch.randn(130, 70),)),
    "attention": (torch.nn.functional.scaled_dot_product_attention, tuple(torch.randn(1, 2, 40, 16) for _ in range(3))),
    "bf16": (torch.nn.Linear(64, 48).bfloat16(), (torch.randn(12, 64).bfloat16(),)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_that_fits_gives_eager_modes_numbers(name):
    fn, inputs = CASES[name]
    tasks, _ = tasks_of(fn, *inputs)
    wanted = fn(*inputs)
    exact = (fn.double() if isinstance(fn, torch.nn.Module) else fn)(*(x.double() for x in inputs))
    if isinstance(fn, torch.nn.Module):
        fn.to(inputs[0].dtype)
    eps = torch.finfo(wanted.dtype).eps
    allowed = 2 * (wanted - exact).abs().max() + 16 * eps * exact.abs().max()
    for task in tasks:
        runner = tune.make_runner(task)
        some = [*task.proposals, *(texts[len(texts) // 2] for texts in directions(task).values())][:14]
        fitting = [text for text, program in zip(some, runner.make(some), strict=True) if program is not None]
        assert len(fitting) > len(some) // 3
        for text in fitting[-4:]:
            torch._dynamo.reset()
            got = torch.compile(fn, backend="deplo", options={"strict": True, "schedule": {task.kernel: text}})(*inputs)
            assert (got - exact).abs().max() <= allowed, text


def test_a_search_finds_what_is_fastest_and_tries_nothing_twice():
    (task,), _ = tasks_of(torch.nn.Softmax(-1), torch.randn(64, 100))
    runner = FakeRunner(lambda text: small_chunks(text) + abs(number(text, "by") - 2) / 10)
    found = tune.Found(task.usual, level="full")
    tune.Search(task, found, runner).run()
    assert found.done and number(found.best, "work") == 2048 and number(found.best, "by") == 2
    assert found.seconds < found.usual_seconds
    assert len(runner.made) == len(set(runner.made))


def test_a_fast_search_measures_what_the_estimate_promises():
    (task,), _ = tasks_of(torch.nn.Linear(256, 512), torch.randn(64, 256), features=feature_sets()[0])

    def cost(text):
        return 1.0 + abs(number(text, "tile(i0") - 32) / 100 + abs(number(text, "tile(r0.k0") - 128) / 1000

    runner = FakeRunner(cost)
    found = tune.Found(task.usual)
    tune.Search(task, found, runner, clock=lambda: 0.0, estimate=lambda texts: [cost(text) for text in texts]).run()
    # Schedules with several decisions changed were estimated, and the best of them measured at once.
    assert cost(found.best) == min(cost(text) for text in runner.made) and found.seconds < found.usual_seconds
    blind = FakeRunner(cost)
    tune.Search(task, tune.Found(task.usual), blind, clock=lambda: 0.0).run()
    assert len(runner.made) < len(blind.made)
    # What the estimate is wrong about is not kept.
    tune.Search(task, wrong := tune.Found(task.usual), FakeRunner(lambda text: 1.0), estimate=lambda texts: [cost(t) for t in texts]).run()
    assert wrong.done and wrong.best == task.usual


def test_estimates_tell_schedules_that_fit_from_others():
    (task,), options = tasks_of(torch.nn.Linear(256, 512), torch.randn(64, 256))
    estimate = tune.estimator(task, calibration.calibration(read_options()).figures())
    wide = [text for texts in directions(task, wide=True).values() for text in texts]
    seconds = estimate([task.usual, "nest parallel(i9)", *wide])
    assert seconds[0] > 0 and seconds[1] is None
    fits = [program is not None for program in tune.make_runner(task).make(wide[:12])]
    assert [s is not None for s in seconds[2:14]] == fits and len({s for s in seconds if s}) > len(wide) // 4


def test_a_fast_search_ends_in_time():
    (task,), _ = tasks_of(torch.nn.Softmax(-1), torch.randn(64, 100))
    now = [0.0]

    class Slow(FakeRunner):
        def race(self, programs, patient=False):
            now[0] += 0.9
            return super().race(programs, patient)

    runner = Slow(lambda text: 1.0)
    found = tune.Found(task.usual)
    tune.Search(task, found, runner, clock=lambda: now[0]).run()
    assert found.done and found.best == task.usual and now[0] < 5
    tune.Search(task, full := tune.Found(task.usual, level="full"), other := Slow(lambda text: 1.0), clock=lambda: now[0]).run()
    assert full.done and len(other.made) > len(runner.made)


def test_a_faster_time_by_chance_is_not_believed():
    (task,), _ = tasks_of(torch.nn.Softmax(-1), torch.randn(64, 100))

    class Lucky(FakeRunner):
        def race(self, programs, patient=False):
            return [1.0 if patient or i == 0 else 0.5 for i in range(len(programs))]

    tune.Search(task, found := tune.Found(task.usual), Lucky(None)).run()
    assert found.best == task.usual and found.done


def compiled(fn, *inputs, **given):
    """The result, and the schedule of each kernel as explain shows it."""
    torch._dynamo.reset()
    with collect_records() as records:
        result = torch.compile(fn, backend="deplo", options={"strict": True, **given})(*inputs)
    (record,) = records
    return result, json.loads(record.program.describe())["kernels"]


def test_winners_are_kept_and_used_without_the_option(monkeypatch, folder):
    x = torch.randn(64, 100)
    model = torch.nn.Softmax(-1)
    monkeypatch.setattr(tune, "make_runner", lambda task: FakeRunner(small_chunks))
    result, (kernel,) = compiled(model, x, tune="fast")
    assert "work=2048" in kernel["schedule"] and kernel["tuned_seconds"] < kernel["usual_seconds"]
    torch.testing.assert_close(result, model(x))
    monkeypatch.setattr(tune, "make_runner", lambda task: pytest.fail("a second search"))
    for given in ({}, {"tune": "fast"}):
        result, (kernel,) = compiled(model, x, **given)
        assert "work=2048" in kernel["schedule"]
        torch.testing.assert_close(result, model(x))
    for given in ({"tune": "off"}, {"threads": 5}):  # another number of threads is another machine
        assert "work=32768" in compiled(model, x, **given)[1][0]["schedule"]
    assert "work=32768" in compiled(model, torch.randn(64, 101))[1][0]["schedule"]
    text = kernel["schedule"].replace("2048", "4096")
    assert "work=4096" in compiled(model, x, schedule={kernel["name"]: text})[1][0]["schedule"]
    explanation = str(deplo.explain(model, x))
    assert "tuned" in explanation and "work=2048" not in explanation


def test_what_is_damaged_or_does_not_fit_is_a_miss(monkeypatch, folder):
    x = torch.randn(64, 100)
    model = torch.nn.Softmax(-1)
    monkeypatch.setattr(tune, "make_runner", lambda task: FakeRunner(small_chunks))
    compiled(model, x, tune="fast")
    (path,) = (folder / "tuned").glob("*.o")
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole.replace(b"2048", b"2049"), b"", b"\0" * 99):
        path.write_bytes(damaged)
        assert "work=32768" in compiled(model, x)[1][0]["schedule"]
    path.unlink()
    ((task,), options) = tasks_of(model, x)
    for schedule in ("nest parallel(i9)", "contraction tile(i0=4)", "no schedule", ""):
        core().store_winner(task.key, {"": schedule}, 1.0, 2.0, tune.Found(schedule).rest(task), options)
        assert "work=32768" in compiled(model, x)[1][0]["schedule"]
    path.chmod(0o666)  # others could write to it
    assert core().load_winner(task.key, options) is None


def test_an_interrupted_search_keeps_what_it_found_and_goes_on(monkeypatch, folder):
    x, model = torch.randn(64, 100), torch.nn.Softmax(-1)
    runners = []

    def make(races):
        def runner(task):
            runners.append(FakeRunner(lambda text: small_chunks(text) + abs(number(text, "by") - 2) / 10, races))
            return runners[-1]

        return runner

    monkeypatch.setattr(tune, "make_runner", make(4))
    with pytest.warns(UserWarning, match="interrupted"):
        result, (kernel,) = compiled(model, x, tune="full")
    torch.testing.assert_close(result, model(x))
    (entry,) = tune.entries(str(folder))
    assert not entry.done and entry.schedule == kernel["schedule"]
    interrupted = entry.schedule
    monkeypatch.setattr(tune, "make_runner", make(10**9))
    _, (kernel,) = compiled(model, x, tune="full")
    (entry,) = tune.entries(str(folder))
    assert entry.done and number(kernel["schedule"], "work") == 2048 and number(kernel["schedule"], "by") == 2
    usual = tasks_of(model, x)[0][0].usual
    assert runners[0].raced & runners[1].raced <= {usual, interrupted}


def test_sizes_that_change_have_a_winner_by_class(monkeypatch):
    x = torch.randn(64, 100)
    keys = [tasks_of(torch.nn.Softmax(-1), torch.randn(rows, 100), dynamic=True)[0][0].key for rows in (40, 63, 64, 300)]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    monkeypatch.setattr(tune, "make_runner", lambda task: FakeRunner(small_chunks))
    for rows, tuned in ((64, True), (300, False)):
        torch._dynamo.reset()
        call = torch.compile(torch.nn.Softmax(-1), backend="deplo", dynamic=True, options={"strict": True, "tune": "fast" if tuned else "auto"})
        with collect_records() as records:
            x = torch.randn(rows, 100)
            torch.testing.assert_close(call(x), torch.softmax(x, -1))
            x = torch.randn(rows + 7, 100)
            torch.testing.assert_close(call(x), torch.softmax(x, -1))
        assert [("work=2048" in json.loads(record.program.describe())["kernels"][0]["schedule"]) for record in records] == [tuned]


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (lambda x, i: x[i] + 1, (torch.randn(9, 5), torch.tensor([8, 0, 3]))),
        (lambda x, i: x // i, (torch.arange(6), torch.arange(1, 7))),
        (lambda x, i: x.index_add(0, i, x[:3]), (torch.randn(9, 5), torch.tensor([8, 0, 3]))),
    ],
    ids=["gather", "division", "scatter"],
)
def test_inputs_are_made_up_on_which_kernels_run(fn, inputs):
    tasks, _ = tasks_of(fn, *inputs)
    for task in tasks:
        runner = Programs.for_task(task)
        assert runner is not None
        assert all(t > 0 for t in runner.race(runner.make([task.usual, task.usual])))


def test_a_real_search_changes_no_result(folder):
    model, x = torch.nn.Sequential(torch.nn.Linear(33, 40), torch.nn.ReLU(), torch.nn.LayerNorm(40)), torch.randn(17, 33)
    state = torch.get_rng_state()
    result, kernels = compiled(model, x, tune="fast")
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(result, model(x))
    found = tune.entries(str(folder))
    assert found and all(entry.done and entry.seconds <= entry.usual_seconds for entry in found)
    used = {kernel["schedule"] for kernel in kernels}
    assert all(entry.schedule in used for entry in found)


def test_the_command_lists_and_removes(monkeypatch, folder, capsys):
    other = folder / "tuned" / "notes.txt"
    assert main(["tune"]) == 0 and "schedules of 0 kernels" in capsys.readouterr().out
    monkeypatch.setattr(tune, "make_runner", lambda task: FakeRunner(small_chunks))
    compiled(torch.nn.Softmax(-1), torch.randn(64, 100), tune="fast")
    other.write_text("mine")
    assert main(["tune", "--schedules"]) == 0
    shown = capsys.readouterr().out
    assert "schedule @k0_softmax: nest" in shown and "work=2048" in shown and "schedules of 1 kernels" in shown
    assert main(["tune", "clear"]) == 0 and "removed 1 " in capsys.readouterr().out
    assert not tune.entries(str(folder)) and other.exists() and [p.name for p in (folder / "tuned").iterdir()] == ["notes.txt"]


def test_without_a_folder_there_is_nothing_to_keep():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(torch.nn.Softmax(-1), torch.randn(4, 5), tune="fast", cache_dir="off")
    assert any("no folder" in str(w.message) for w in caught)
    assert not list(Path(read_options().cache_folder()).glob("tuned/*"))


def test_pytorchs_cache_is_not_asked_for_a_search_and_knows_of_winners(monkeypatch, folder):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "torch"))
    x, model = torch.randn(64, 100), torch.nn.Softmax(-1)
    assert "work=32768" in compiled(model, x)[1][0]["schedule"]
    monkeypatch.setattr(tune, "make_runner", lambda task: FakeRunner(small_chunks))
    assert "work=2048" in compiled(model, x, tune="fast")[1][0]["schedule"]
    assert "work=2048" in compiled(model, x)[1][0]["schedule"]


def test_the_machine_is_measured_once(monkeypatch, folder, capsys):
    options, runs = read_options(), []

    def measured(given):
        runs.append(given)
        return calibration.Calibration(**dict.fromkeys(calibration.Calibration.__annotations__, 2e9))

    monkeypatch.setattr(calibration, "measure_calibration", measured)
    first = calibration.calibration(options)
    assert calibration.calibration(options) == first and len(runs) == 1
    assert calibration.calibration(options.replace(threads=5)) and calibration.calibration(options, anew=True) and len(runs) == 3
    for path in folder.glob("machine-*.json"):
        path.write_text(path.read_text().replace("2000000000.0", '"x"', 1))
    assert calibration.calibration(options) == first and len(runs) == 4
    assert main(["env"]) == 0 and "f32 2, bf16 2, int8 2 GOPS" in capsys.readouterr().out and len(runs) == 4


def test_what_the_machine_does_is_measured():
    found = calibration.measure_calibration(read_options())
    features = set(json.loads(core().env(""))["cpu features"])
    assert min(found.f32, found.l1, found.l2, found.l3, found.dram, found.dram_all) > 0
    assert (found.bf16 > 0, found.int8 > 0) == ("avx512bf16" in features, bool(features & {"avx512vnni", "avxvnni"}))
    assert found.threads == torch.get_num_threads() and min(found.page_fault, found.barrier, found.fork) >= 0
