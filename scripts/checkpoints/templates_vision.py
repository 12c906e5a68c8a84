"""Chat templates of the vision families, with the behaviour of the published ones.

A line end right after a block tag would be trimmed, so there it is written as an expression.
"""

from __future__ import annotations

# A system turn becomes the first lines of the user's turn; the assistant is called `model`.
GEMMA3 = (
    "{{ bos_token }}"
    "{% set opening = '' %}{% set turns = messages %}"
    "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}"
    "{% if messages[0]['content'] is string %}{% set opening = messages[0]['content'] + '\n\n' %}"
    "{% else %}{% set opening = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %}"
    "{% endif %}"
    "{% for message in turns %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if loop.first %}{{ opening }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}"
    "<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

GEMMA2 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

# Thinking is off unless asked for, and then announced in the system turn.
GEMMA4 = (
    "{{ bos_token }}"
    "{% set ask = enable_thinking is defined and enable_thinking %}"
    "{% for message in messages %}"
    "{% if loop.first and ask and message['role'] != 'system' %}<|turn>system\n<|think|>\n<turn|>\n{% endif %}"
    "<|turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if loop.first and ask and message['role'] == 'system' %}<|think|>\n{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] | trim }}"
    "{% elif part['type'] in ('image', 'audio', 'video') %}<|{{ part['type'] }}|>{% endif %}"
    "{% endfor %}{% endif %}"
    "<turn|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)

# No template is published; the processor itself puts BOS after the last picture and a line end after the text.
PALIGEMMA = (
    "{% for message in messages if message['content'] is not string %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% endfor %}"
    "{% for message in messages %}"
    "{% if not loop.first %}{{ raise_exception('Only one turn is supported') }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] if part['type'] == 'text' %}"
    "{% if not loop.first %} {% endif %}{{ part['text'] }}"
    "{% endfor %}{% endif %}"
    "{% endfor %}"
)

# Without pictures a system turn with dates comes first, whether or not the caller wrote one.
MLLAMA = (
    "{{ bos_token }}"
    "{% if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{% set seen = namespace(images=false) %}"
    "{% for message in messages if message['content'] is not string %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{% set seen.images = true %}{% endif %}"
    "{% endfor %}{% endfor %}"
    "{% set system = none %}{% set turns = messages %}"
    "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}"
    "{% set system = messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'][0]['text'] %}"
    "{% endif %}"
    "{% if system is not none or not seen.images %}"
    "<|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: {{ date_string }}\n\n{{ (system or '') | trim }}<|eot_id|>"
    "{% endif %}"
    "{% for message in turns %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image|>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# Within a turn all pictures come first, whatever the order of the parts.
LLAVA_NEXT = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}<<SYS>>\n{% elif message['role'] == 'user' %}[INST] {% else %} {% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}"
    "{% if message['role'] == 'system' %}{{ '\n' }}<</SYS>>\n\n"
    "{% elif message['role'] == 'user' %} [/INST]{% else %}</s>{% endif %}"
    "{% endfor %}"
)

LLAVA_ONEVISION = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }} "
    "{% if message['content'] is string %}{{ '\n' + message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'video' %}<video>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ '\n' + part['text'] }}{% endfor %}"
    "{% endif %}"
    "<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Parts keep their order; no system turn is added.
INTERNVL = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<IMG_CONTEXT>\n"
    "{% elif part['type'] == 'video' %}<video>\n"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

PHI4 = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] in ('image', 'audio') %}<|{{ part['type'] }}|>{% endif %}"
    "{% endfor %}{% endif %}"
    "<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
)


def smolvlm(start: str) -> str:
    """The template of Idefics3 and SmolVLM: ``start`` once, then a line a turn; no space before a leading picture."""
    return (
        start + "{% for message in messages %}"
        "{{ message['role'] | capitalize }}"
        "{% if message['content'] is string %}: {{ message['content'] }}"
        "{% else %}"
        "{% if message['content'][0]['type'] == 'image' %}:{% else %}{{ ': ' }}{% endif %}"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% elif part['type'] in ('image', 'video') %}<{{ part['type'] }}>{% endif %}"
        "{% endfor %}{% endif %}"
        "<end_of_utterance>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    )
