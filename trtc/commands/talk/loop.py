"""A conversation, message by message."""

from collections.abc import Iterable

from trtc.commands.model_name import OpenModel
from trtc.commands.screen import Screen
from trtc.commands.talk.answers import Answer, write_answer
from trtc.commands.talk.dialogue import Dialogue
from trtc.commands.talk.interruption import Interruption
from trtc.commands.talk.slash import COMMANDS, END, Place, read_command
from trtc.protos.errors import CancelledError, TrtcError


def talk(model: OpenModel, dialogue: Dialogue, screen: Screen, messages: Iterable[str]) -> None:
    """Answer `messages` until they end, or one is /bye.

    At a terminal an error is shown, and the conversation goes on.

    Raises:
        TrtcError: a message cannot be answered, and input is not a terminal.
    """
    place = Place(dialogue, screen, model.info)
    for message in messages:
        try:
            command = read_command(message)
            if command is not None:
                name, rest = command
                if name == END:
                    return
                COMMANDS[name].run(place, rest)
            elif message.strip():
                answer_message(model, dialogue, screen, message.strip())
        except TrtcError as error:
            if not screen.is_terminal:
                raise
            screen.complain(error)
        except KeyboardInterrupt:  # a second one, while the first was seen to
            if not screen.is_terminal:
                raise


def answer_message(model: OpenModel, dialogue: Dialogue, screen: Screen, message: str) -> None:
    """Say `message` to the model and show what it answers.

    At a terminal Ctrl-C stops the answer, which stays as far as it came.

    Raises:
        TrtcError: there is no answer, or it broke off.
    """
    dialogue.ask(message)
    answer, interruption = Answer(), Interruption()
    try:
        with interruption:
            generation = model.completer.chat(
                dialogue.messages(), model=model.name, **dialogue.settings
            )
            interruption.cancels(generation)
            write_answer(generation, answer, screen.answer)
    except CancelledError:
        if not interruption.has_come:
            raise
    except KeyboardInterrupt:  # a second one, while the first was seen to
        if not screen.is_terminal:
            raise
    finally:
        if interruption.has_come:
            answer.finish_reason = None
        dialogue.answered(answer)
        if answer.num_tokens or answer.usage:
            screen.say()
    if interruption.has_come and not screen.is_terminal:
        raise KeyboardInterrupt
