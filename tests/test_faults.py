"""The quick part of the fault harness; all of it: python tests/faults/run.py."""

import pytest
from conftest import own_process

GROUPS = ['stopped_and_resumed,another_number_of_processes,deterministic_on_any_number_of_processes',
          'killed_at_random_instants,killed_at_each_point_of_a_save,truncated',
          'bits_flipped,all_checkpoints_damaged,files_may_not_grow,console_is_full,signal_that_saves,signal_twice',
          'signal_during_an_evaluation,time_is_up,signal_to_one_of_several,a_process_is_lost,every_loss_is_nan,two_runs_in_one_folder,data_changed_between']


@pytest.mark.parametrize('cases', GROUPS)
def test_what_is_broken_does_not_matter(cases):
    done = own_process('tests/faults/run.py', '--quick', f'--only={cases}')
    assert done.status == 0, done.out + done.err
    assert done.out.count('FAILED') == 0 and f"{len(cases.split(','))} cases, 0 failed" in done.out
