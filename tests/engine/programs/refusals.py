"""Programs that are refused or fail, each before, in or after its block."""

from __future__ import annotations

from typing import Any

import nnsight
import torch

from .registry import OTHER, PROMPT, home, program

ONE = {"temperature": 0.0, "max_tokens": 1}


@program()
def a_barrier(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            barrier()
            logits = model.logits.save()
        with tracer.invoke(OTHER):
            barrier()
    return home(logits=logits)


@program()
def a_barrier_in_a_block(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where) as tracer:
        tracer.barrier(2)
        logits = model.logits.save()
    return home(logits=logits)


@program()
def a_list_of_prompts(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace([PROMPT, OTHER], **ONE, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def a_list_of_prompts_to_an_invoke(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke([PROMPT, OTHER]):
            logits = model.logits.save()
    return home(logits=logits)


@program()
def two_prompts_to_an_invoke(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke(PROMPT, OTHER):
            logits = model.logits.save()
    return home(logits=logits)


@program()
def a_batch_of_tokenizer_output(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    inputs = {"input_ids": [[300, 301], [302, 303]]}
    with model.trace(inputs, **ONE, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def no_prompt_at_all(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def an_empty_prompt(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace([], **ONE, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def an_invoke_without_a_prompt(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke(PROMPT):
            first = model.logits.save()
        with tracer.invoke():
            second = model.logits.save()
    return home(first=first, second=second)


@program()
def an_invoke_without_prompt_and_body(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    # The one empty invoke that is let through: there is nothing in it to lose.
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke(PROMPT):
            first = model.logits.save()
        with tracer.invoke():
            pass
    return home(first=first)


@program()
def an_unknown_setting_on_a_trace(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, max_new_token=5, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def an_unknown_setting_above_invokes(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(temprature=0.0, **where) as tracer:
        with tracer.invoke(PROMPT):
            logits = model.logits.save()
    return home(logits=logits)


@program()
def an_unknown_setting_on_an_invoke(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke(PROMPT, max_new_token=5):
            logits = model.logits.save()
    return home(logits=logits)


@program()
def a_setting_out_of_range(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=-1.0, max_tokens=1, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def no_tokens_asked_for(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, max_tokens=0, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def a_scan(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.scan(PROMPT, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def a_scan_of_a_trace(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, scan=True, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def a_prompt_too_long(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace([300] * 513, **ONE, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def a_token_that_does_not_exist(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace([300, 99999], **ONE, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def reads_out_of_order(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        late = model.model.layers[5].output[0].save()
        early = model.model.layers[2].output[0].save()
    return home(late=late, early=early)


@program()
def a_write_out_of_order(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        late = model.model.layers[5].output
        model.model.layers[2].output = late
    return home(late=late)


@program()
def a_module_that_is_never_called(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        hidden = model.model.layers[5].output[0].save()
        weights = model.lm_head.output.save()
    return home(hidden=hidden, weights=weights)


@program()
def a_read_after_the_result(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where) as tracer:
        result = tracer.result.save()
        hidden = model.model.layers[5].output[0].save()
    return home(result=result, hidden=hidden)


@program()
def a_read_outside_a_trace(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        logits = model.logits.save()
    return home(logits=logits, hidden=model.model.layers[5].output)


@program()
def a_negative_step(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=2, **where) as tracer:
        for _ in tracer.iter[[-1]]:
            logits = model.logits.save()
    return home(logits=logits)


@program()
def an_edit_that_is_not_installed(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, edits=["nobody's"], **ONE, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def an_edit_of_an_invoke_that_is_not_installed(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke(PROMPT, edits=["nobody's"]):
            logits = model.logits.save()
    return home(logits=logits)


@program()
def edits_given_as_a_string(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, edits="probe", **ONE, **where):
        logits = model.logits.save()
    return home(logits=logits)


@program()
def edits_that_are_no_names(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(edits=[3], **ONE, **where) as tracer:
        with tracer.invoke(PROMPT):
            logits = model.logits.save()
    return home(logits=logits)


@program()
def an_edit_whose_name_is_no_string(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(name=3, **where) as (_, edit):
        model.model.layers[3].output[0][:] = 0
    edit.clear()
    return home(name=edit.name)


@program()
def an_edit_of_a_copy(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(inplace=False, **where) as (_, edit):
        model.model.layers[3].output[0][:] = 0
    edit.clear()
    return home(name=edit.name)


@program()
def an_edit_that_raises(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.edit(**where) as (_, edit):
        model.model.layers[3].output[0][:, :, 0]
    try:
        with model.trace(PROMPT, **ONE, **where):
            logits = model.logits.save()
    finally:
        edit.clear()
    return home(logits=logits)


@program()
def an_error_in_the_first_line(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        number = nnsight.save(1 / 0)
    return home(number=number)


@program()
def an_error_after_a_save(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, **where):
        hidden = model.model.layers[3].output[0].save()
        wrong = model.model.layers[4].output[0][:, -1, :].save()
    return home(hidden=hidden, wrong=wrong)


@program()
def an_error_in_a_loop(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, temperature=0.0, max_tokens=6, ignore_eos=True, **where) as tracer:
        samples = nnsight.save([])
        for step in tracer.iter[:6]:
            samples.append(model.samples.item())
            if step == 1:
                raise KeyError("mid-loop")
    return home(samples=samples)


@program()
def an_error_in_the_last_line(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where) as tracer:
        result = tracer.result.save()
        result.no_such_thing  # noqa: B018
    return home(result=result)


@program()
def an_error_above_the_invokes(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        rows = nnsight.save([None] * int("two"))
        with tracer.invoke(PROMPT):
            rows[0] = model.logits
    return home(rows=rows)


@program(batched=True)
def an_error_in_one_of_two_invokes(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke(PROMPT):
            fine = model.logits.save()
        with tracer.invoke(OTHER):
            raise ValueError("the second: 100% wrong\nand a second line")
    return home(fine=fine)


@program()
def an_error_in_a_helper(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    def helper(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.reshape(-1, 7)

    with model.trace(PROMPT, **ONE, **where):
        hidden = helper(model.model.layers[3].output[0]).save()
    return home(hidden=hidden)


@program()
def an_error_of_a_class_of_the_notebook(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    class ProbeError(Exception):
        """An error of the caller's own."""

    with model.trace(PROMPT, **ONE, **where):
        if model.model.layers[3].output[0].shape[0]:
            raise ProbeError("layer 3: no such direction")
    return home()


@program()
def a_module_that_does_not_exist(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        hidden = model.model.layers[3].no_such_module.output.save()
    return home(hidden=hidden)


@program()
def a_layer_that_does_not_exist(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        hidden = model.model.layers[99].output[0].save()
    return home(hidden=hidden)


@program()
def a_source_operation_that_does_not_exist(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        hidden = model.model.layers[3].mlp.source.no_such_operation_0.output.save()
    return home(hidden=hidden)


@program()
def a_name_that_does_not_exist(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        hidden = (model.model.layers[3].output[0] + nobody).save()  # noqa: F821
    return home(hidden=hidden)


@program(advised=True)
def a_name_of_a_sibling_invoke(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(**ONE, **where) as tracer:
        with tracer.invoke(PROMPT):
            donor = model.model.layers[3].output[0]
        with tracer.invoke(OTHER):
            model.model.layers[3].output[0][-1] = donor[-1]
            logits = model.logits.save()
    return home(logits=logits)


@program()
def a_save_that_cannot_travel(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        import threading

        hidden = model.model.layers[3].output[0].save()
        lock = nnsight.save(threading.Lock())
    return home(hidden=hidden, lock=lock)


@program()
def a_captured_thing_that_cannot_travel(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    import threading

    lock = threading.Lock()
    with model.trace(PROMPT, **ONE, **where):
        with lock:
            logits = model.logits.save()
    return home(logits=logits)


@program()
def a_backward_pass(model: Any, where: dict[str, Any]) -> dict[str, Any]:
    with model.trace(PROMPT, **ONE, **where):
        model.logits.sum().backward()
    return home()
