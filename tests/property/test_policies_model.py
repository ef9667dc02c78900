"""The index against a dict under every policy; and that all policies keep to their contract.

The model, and what it promises, is that of test_tree_model.py; here it runs with each policy, small
enough that shadows fill and are forgotten, with sizes that change and leaves that come and go.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import test_tree_model
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from test_tree_model import WIDTH, TreeModel, chain_of

from tutti_core.index.pages import NamespacePages
from tutti_core.index.radix import Locations
from tutti_core.index.restore import build_pages
from tutti_core.policies.choice import POLICIES, make_policy
from tutti_core.policies.segments import SegmentPolicy

NAMES = sorted(POLICIES)


class PolicyModel(TreeModel):
    """The tree model with a policy of one's choice."""

    policy_name = "lru"

    def new_pages(self) -> NamespacePages:
        return NamespacePages(WIDTH, self.new_policy())

    def new_policy(self):
        return make_policy(self.policy_name, 40, seed=3)

    @precondition(lambda self: not self.pins)
    @rule()
    def restart(self) -> None:
        build = partial(build_pages, policy=self.new_policy())
        with mock.patch.object(test_tree_model, "build_pages", build):
            super().restart()
        assert self.pages.tree.policy.name == self.policy_name

    @rule(capacity_pages=st.integers(0, 80))
    def resize(self, capacity_pages: int) -> None:
        self.pages.tree.policy.resize(capacity_pages)

    @rule()
    def parking_the_next_to_go_changes_nothing(self) -> None:
        tree = self.pages.tree
        leaf = tree.victim(self.tick())
        if leaf is not None:
            tree.park(leaf)
            tree.check()
            tree.unpark(leaf)
            tree.check()
            assert tree.victim(self.now) is leaf

    @rule()
    def there_is_a_victim_while_there_are_leaves(self) -> None:
        policy = self.pages.tree.policy
        leaf = policy.victim(self.tick())
        assert (leaf is None) == (not policy.listed())
        assert leaf is None or leaf.listed
        if isinstance(policy, SegmentPolicy):
            for queue in policy.queues:
                assert queue.page_count == sum(queue._pages.values())
                assert queue._pages.keys() == {leaf.serial for leaf in queue}


@pytest.mark.parametrize("name", NAMES)
def test_the_tree_model_holds_under_every_policy(name: str) -> None:
    machine = type(f"Model_{name}", (PolicyModel,), {"policy_name": name})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )


STEPS = st.lists(st.tuples(st.text("abcd", min_size=1, max_size=6), st.booleans()), max_size=60)


def history(name: str, steps: list[tuple[str, bool]], capacity: int = 12) -> list[bytes]:
    """Look each chain up and save what is missing; the keys evicted, in order."""
    pages = NamespacePages(WIDTH, make_policy(name, capacity, seed=5))
    policy, gone = pages.tree.policy, []
    for now, (word, sparse) in enumerate(steps, 1):
        keys = chain_of(word)
        hit = pages.match(keys, 0, 10 * now)
        pages.guard(keys)
        while pages.page_count > capacity - (len(word) - hit):
            victim = pages.victim(2 if sparse else 9, 10 * now)
            assert victim is not None
            gone.append(victim.keys)
            pages.forget(victim, 10 * now)
        pages.unguard()
        new = Locations.absent(len(word) - hit)
        new.slot[:] = 1
        pages.insert(keys, hit, True, new, 10 * now + 1)
        pages.tree.check()
        if isinstance(policy, SegmentPolicy):  # nothing is dropped here, so the sizes are exact
            for queue in policy.queues:
                assert queue.page_count == sum(len(leaf) for leaf in queue)
    return gone


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(steps=STEPS)
def test_the_same_calls_give_the_same_victims(name: str, steps: list[tuple[str, bool]]) -> None:
    assert history(name, steps) == history(name, steps)
