from __future__ import annotations

import pytest

from biphase.errors import InvalidRequestError
from biphase.tokenizer.chat_template import ChatTemplate

USER = {"role": "user", "content": "hi"}


def _template(text: str, **special: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, special)


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n<{{ m.content }}>\n  {% endif %}\n{% endfor %}",
        "{{ messages | tojson }} {{ {'a': '<&é'} | tojson(indent=2) }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
        "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}{% continue %}{% endfor %}{{ s.n }}",
        "{{ bos_token }}{{ '%s' % messages[0]['content'] }}{{ tools is none }}{{ add_generation_prompt }}",
    ],
)
def test_renders_as_transformers_does(text: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [USER, {"role": "assistant", "content": "<b> ü"}]
    (theirs,), _ = render_jinja_template(
        conversations=[messages], chat_template=text, add_generation_prompt=True, bos_token="<s>"
    )
    assert _template(text, bos_token="<s>").render(messages) == theirs


def test_refusals_of_the_template_are_the_callers_fault() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        _template("{{ raise_exception('roles must alternate') }}").render([USER])
    with pytest.raises(InvalidRequestError, match="fails on these messages"):
        _template("{{ messages[0].content + 1 }}").render([USER])
    with pytest.raises(InvalidRequestError):
        _template("{{ messages[9].content.x }}").render([USER])
    with pytest.raises(InvalidRequestError):
        _template("{% for i in range(10 ** 12) %}{{ i }}{% endfor %}").render([USER])


def test_the_sandbox_holds() -> None:
    with pytest.raises(InvalidRequestError):
        _template("{{ messages.append(1) }}").render([USER])
    with pytest.raises(InvalidRequestError):
        _template("{{ ''.__class__.__mro__[1].__subclasses__() }}").render([USER])


def test_variables_reach_the_template_but_cannot_replace_the_messages() -> None:
    template = _template("{{ enable_thinking }}{{ messages[0].content }}")
    assert template.render([USER], variables={"enable_thinking": False, "messages": []}) == "Falsehi"


def test_continue_final_message_cuts_what_follows_it() -> None:
    template = _template("{% for m in messages %}[{{ m.content }}]\n{% endfor %}")
    chat = [USER, {"role": "assistant", "content": "The answer is "}]
    assert template.render(chat, continue_final_message=True) == "[hi]\n[The answer is "
    trimming = _template("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    assert trimming.render(chat, continue_final_message=True) == "[hi][The answer is"
    with pytest.raises(InvalidRequestError, match="final message"):
        _template("nothing").render(chat, continue_final_message=True)


@pytest.mark.parametrize(
    ("text", "wants"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for t in m.tool_calls %}{{ t.name }}{% endfor %}{% endfor %}", False),
    ],
)
def test_knows_whether_content_is_walked_over(text: str, wants: bool) -> None:
    assert _template(text).wants_content_parts(with_tools=False) is wants
