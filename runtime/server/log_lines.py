"""Lines of the server's log name the call that they are about."""

import logging

from trtc.runtime.requests.call import current_call


class CallFormatter(logging.Formatter):
    """Ends the message of what is logged while a call is answered with ` request_id=ID`."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        call = current_call()
        line = super().formatMessage(record)
        return f"{line} request_id={call.id}" if call.id else line
