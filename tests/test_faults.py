"""The quick part of the fault harness; all of it: python tests/faults/run.py."""

import pytest
from conftest import own_process

GROUPS = [
    'stopped_and_resumed killed_at_random_instants killed_at_each_point_of_a_save truncated bits_flipped '
    'files_may_not_grow signal_during_an_evaluation the_weights_are_ruined data_cannot_be_read',
    'signal_to_one_of_several a_process_is_lost signal_that_saves signal_twice time_is_up every_loss_is_nan two_runs_in_one_folder']


@pytest.mark.parametrize('group', GROUPS, ids=['one process', 'several processes and signals'])
def test_what_is_broken_does_not_matter(group):
    cases = group.split()
    done = own_process('tests/faults/run.py', '--quick', f"--only={','.join(cases)}")
    assert done.status == 0, done.out + done.err
    assert f"{len(cases)} cases, 0 failed" in done.out
