"""Chat templates with the behaviour of the published ones, by manner of prompting."""

from __future__ import annotations

DEFAULT_SYSTEM = (
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
)
CHATML = (
    "{% for message in messages %}" + DEFAULT_SYSTEM + "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Contents are a string or a list of parts; `add_vision_id` numbers pictures and videos over the whole conversation.
QWEN2_VL = (
    "{% set seen = namespace(images=0, videos=0) %}"
    "{% for message in messages %}" + DEFAULT_SYSTEM + "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "{% set seen.images = seen.images + 1 %}{% if add_vision_id %}Picture {{ seen.images }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' or 'video' in part %}"
    "{% set seen.videos = seen.videos + 1 %}{% if add_vision_id %}Video {{ seen.videos }}: {% endif %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Within a turn all pictures come first, whatever the order of the parts, and every text ends with a space.
LLAVA = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'] | upper }}: {% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }} "
    "{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }} {% endfor %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

LLAMA3 = (
    "{% for message in messages %}"
    "{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
