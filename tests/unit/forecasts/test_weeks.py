"""If these fail, what is foretold of weeks with faults is not what the run's own decisions would do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.errors import BadInputError
from myriad.forecasts.fleet.fault_mix import DAY, DrawnFault, FaultKindShare, draw_faults, load_mix
from myriad.forecasts.fleet.fleet_study import StudySetting, compare, published_ledger, sensitivity_changes
from myriad.forecasts.fleet.policy_times import PolicyTimes, load_published, load_times
from myriad.forecasts.fleet.virtual_cluster import VirtualCluster
from myriad.recipes import recipe_names
from myriad.supervise.accounting.ledger import Ledger

TIMES = load_times()
STEP = TIMES.step_seconds
AT = 10_000.0


def run(*faults: DrawnFault, seconds: float = DAY, spares: int = 2, nodes: int = 4, **times: float) -> Ledger:
    cluster = VirtualCluster(load_times(**times), faults, spares=spares, nodes=nodes)
    return cluster.run(seconds)


def fault(at: float = AT, place: float = 0.3, draw: float = 0.9, **kind: object) -> DrawnFault:
    return DrawnFault(at, "it", FaultKindShare(weight=1, **kind), place, draw)


def cost(*faults: DrawnFault, **how: float) -> dict[str, float]:
    """Seconds of each class beyond those of a healthy run."""
    with_faults, without = run(*faults, **how).seconds(), run(**how).seconds()
    return {kind: with_faults[kind] - without[kind] for kind in with_faults if kind != "training"}


def test_a_healthy_run_loses_its_start_and_the_snapshots():
    found = run().seconds()
    assert found["starting"] == TIMES.cold_start_seconds and found["restarting"] == 0
    assert found["saving"] == pytest.approx(TIMES.saving_ratio * (DAY - TIMES.cold_start_seconds))
    assert found["training"] == pytest.approx(DAY - found["starting"] - found["saving"])


def test_a_crash_costs_a_restart_and_at_most_two_steps():
    found = cost(fault(shows="exit", cause="killed"))
    assert found["detecting"] == pytest.approx(TIMES.crash_seen_seconds)
    assert found["restarting"] == pytest.approx(TIMES.end_seconds + TIMES.restart_seconds)
    assert STEP <= found["lost"] <= 2 * STEP


def test_a_lost_node_is_found_by_its_silence_and_goes_back_to_the_last_copy():
    ledger = run(fault(shows="silent"))
    found = ledger.seconds()
    assert 3.5 <= found["detecting"] <= 4.5 and found["waiting"] == 0.0
    assert STEP <= found["lost"] <= (TIMES.copies_every + 1) * STEP
    assert ledger.spare_node_seconds == pytest.approx(2 * DAY - (DAY - AT) + 4.0, abs=5.0)


def test_a_hang_is_found_at_five_steps():
    found = cost(fault(shows="hang"))
    assert 5 * STEP <= found["detecting"] <= 5 * STEP + 3.0


def test_a_broken_device_is_swapped_once_and_fails_no_more():
    assert run(fault(shows="exit", cause="device", stays=True)).attempt == 2


def test_a_node_that_hangs_again_is_found_although_another_was_named_first():
    ledger = run(fault(shows="hang", stays=True, draw=0.0))
    assert ledger.attempt == 3 and ledger.seconds()["detecting"] > 300


def test_without_spares_the_run_waits_until_the_node_is_repaired():
    found = run(fault(shows="silent"), spares=0, repair_seconds=7200.0).seconds()
    assert 7200 - 600 < found["waiting"] < 7200 and found["person"] == 0.0


def test_a_device_that_stays_broken_without_a_spare_ends_the_run_and_a_person_comes():
    found = run(fault(shows="exit", cause="device", stays=True), spares=0, repair_seconds=3600.0).seconds()
    assert found["person"] == TIMES.person_seconds and found["waiting"] == pytest.approx(3600.0, abs=1.0)


def test_two_nodes_lost_at_once_are_one_incident():
    ledger = run(fault(shows="silent", place=0.1), fault(AT + 1, shows="silent", place=0.9))
    assert ledger.attempt == 2 and ledger.seconds()["restarting"] < 300 + 75


def test_wrong_numbers_that_show_nowhere_cost_what_was_done_until_a_person_sees_them():
    unseen = cost(fault(shows="corrupt", stays=True))
    assert unseen["lost"] >= TIMES.unseen_seconds * 0.99
    assert unseen["diagnosing"] == pytest.approx(TIMES.save_seconds + TIMES.person_seconds)


def test_replicas_that_differ_go_back_to_what_all_agreed_on():
    ledger = run(fault(shows="corrupt"), corrupt_shown_ratio=1.0)
    assert ledger.attempt == 2 and ledger.seconds()["diagnosing"] == 0.0
    assert ledger.seconds()["lost"] <= (2 * TIMES.verify_every + 2) * STEP


def test_corruption_before_anything_was_agreed_on_ends_no_run():
    ledger = run(fault(at=310.0, shows="corrupt"), corrupt_shown_ratio=1.0)
    assert ledger.attempt == 2 and ledger.seconds()["person"] == 0.0


def test_a_node_that_corrupts_again_gives_way_and_what_it_alone_had_comes_from_storage():
    ledger = run(fault(shows="corrupt", stays=True), corrupt_shown_ratio=1.0)
    assert ledger.attempt == 3, "found twice, then on a spare"
    assert ledger.seconds()["lost"] <= TIMES.durable_seconds + 2 * (2 * TIMES.verify_every + 2) * STEP


def test_numbers_that_are_none_are_replayed_moved_and_their_node_evicted():
    once = run(fault(shows="nan"))
    assert once.attempt == 2 and once.seconds()["lost"] <= 2 * STEP
    always = run(fault(shows="nan", stays=True))
    assert always.attempt == 3 and always.seconds()["diagnosing"] == 0.0
    seconds = DAY - AT
    assert always.spare_node_seconds == pytest.approx(2 * DAY - seconds, abs=600), "sent for repair"


def test_a_node_a_little_slow_costs_its_share_until_a_person_has_found_it():
    found = cost(fault(shows="slow", stays=True))
    seen = TIMES.unseen_seconds + TIMES.person_seconds
    assert found["slow"] == pytest.approx(seen * 0.1 / 1.1, rel=0.01)
    assert found["diagnosing"] == pytest.approx(TIMES.save_seconds)


def test_a_node_slow_enough_to_be_reported_gives_way_to_a_spare_and_no_step_is_lost():
    found = cost(fault(shows="slow", stays=True), slower_ratio=0.5)
    assert found["slow"] < 150 * 0.5 / 1.5 and found["lost"] == 0.0
    assert found["restarting"] == pytest.approx(TIMES.restart_seconds, abs=1.0)


def test_without_a_spare_work_moves_away_from_a_slow_node():
    slow = fault(shows="slow", stays=True)
    told, moved = (cost(slow, spares=0, slower_ratio=ratio)["slow"] for ratio in (0.25, 0.5))
    assert moved < told, "a quarter slower is not told, and costs more than half, of which most is moved"


def test_a_new_start_that_a_person_wanted_is_no_fault():
    found = cost(fault(shows="planned"))
    assert found["planned"] == pytest.approx(TIMES.save_seconds + TIMES.cold_start_seconds)
    assert found["detecting"] == 0.0


kinds = st.builds(
    FaultKindShare,
    weight=st.just(1.0),
    shows=st.sampled_from(["exit", "hang", "silent", "nan", "corrupt", "slow", "planned"]),
    cause=st.sampled_from(["device", "user", "killed", "disk", "host memory"]),
    stays=st.booleans(),
)
many_faults = st.lists(
    st.builds(DrawnFault, st.floats(0, 2 * DAY), st.just("x"), kinds, st.floats(0, 0.99), st.floats(0, 1)),
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(many_faults, st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.1, 0.5]))
def test_whatever_comes_every_second_is_accounted_for_and_training_continues(faults, spares, shown, slower):
    told = {"corrupt_shown_ratio": shown, "slower_ratio": slower}
    how = {"spares": spares, "repair_seconds": 20_000.0, **told}
    ledger = run(*sorted(faults, key=lambda one: one.at), seconds=6 * DAY, **how)
    found = ledger.seconds()
    assert sum(found.values()) == pytest.approx(ledger.wall_seconds) == 6 * DAY
    assert min(found.values()) >= 0 and ledger.stretches[-1].shares.get("training", 0) > 0.5
    rival = published_ledger(load_published("byterobust"), TIMES, faults, 6 * DAY, spares=spares)
    assert sum(rival.seconds().values()) == pytest.approx(6 * DAY)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_few_nodes_stand_for_many(seed):
    """Every fault of the cluster hits one of the few; were they more, the ledger would be the same."""
    faults = draw_faults(load_mix("llama3"), 12288, 7 * DAY, seed)
    few, many = (
        VirtualCluster(TIMES, faults, spares=16, nodes=nodes).run(7 * DAY).seconds() for nodes in (16, 64)
    )
    assert few == pytest.approx(many)


@pytest.mark.parametrize("name", recipe_names("mixes"))
def test_faults_come_at_the_rate_of_the_mix(name):
    mix = load_mix(name)
    assert mix.per_day(12288) == pytest.approx(5.8, abs=0.03)
    drawn = draw_faults(mix, 12288, 400 * DAY, 1)
    assert len(drawn) / 400 == pytest.approx(5.8, rel=0.1)
    assert {one.name for one in drawn} <= set(mix.kinds)
    assert draw_faults(mix, 12288, 400 * DAY, 1) == drawn


def test_the_counts_of_llama_3_are_all_there():
    mix = load_mix("llama3")
    assert sum(kind.weight for kind in mix.kinds.values()) == mix.faults


def test_all_policies_meet_the_same_faults_and_to_see_corruption_helps():
    setting = StudySetting(load_mix("llama3"), 12288, 14 * DAY, 16, TIMES, range(2))
    myriad, shown, *rivals = compare(setting, lambda: None)
    assert shown.mean > myriad.mean and [one.title for one in rivals] == ["ByteRobust-like", "MegaScale-like"]
    assert all(sum(one.shares.values()) == pytest.approx(1.0) for one in (myriad, shown, *rivals))
    low, high = myriad.interval
    assert low <= myriad.mean <= high


def test_each_time_of_the_table_is_varied():
    setting = StudySetting(load_mix("llama3"), 12288, DAY, 16, TIMES, range(1))
    names = {name for name, _, changed in sensitivity_changes(setting) if changed != setting}
    assert names == {*PolicyTimes.model_fields, "faults a day", "spare nodes", "patience"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("source = 1\n[", "not valid TOML"),
        ("source = 's'\nfaults = 1\naccelerators = 1\ndays = 1\nkinds = {}", "kinds"),
        (
            "source = 's'\nfaults = 1\naccelerators = 1\ndays = 1\nkinds.a = {weight = 0, shows = 'exit'}",
            "weight",
        ),
    ],
)
def test_a_mix_that_is_none_is_refused(tmp_path, text, said):
    path = tmp_path / "mix.toml"
    path.write_text(text)
    with pytest.raises(BadInputError, match=said):
        load_mix(str(path))


def test_an_error_of_the_program_that_comes_again_at_once_ends_the_run_and_a_person_comes():
    found = run(fault(shows="exit", cause="user", stays=True)).seconds()
    assert found["person"] == TIMES.person_seconds
