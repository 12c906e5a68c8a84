"""Chat templates of the vision families, with the behaviour of the published ones."""

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
