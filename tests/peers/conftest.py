"""What of hmmlearn's tests is not run."""

LEFT_OUT = {
    "scaling": "the same tests again: of implementations there is one here",
    "test_criterion": "hundreds of iterations, after which it asserts what holds for any numbers",
}


def pytest_collection_modifyitems(config, items):
    ours = [item for item in items if item.path.name == "test_suite_of_hmmlearn.py"]
    for item in ours:  # what fails there must pass here
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "xfail"]
    left_out = [item for item in ours if any(word in item.name for word in LEFT_OUT)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
