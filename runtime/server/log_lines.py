"""Adds the id of the current call to lines of the server's log."""

import logging

from trtc.runtime.requests.call import current_call


class CallFormatter(logging.Formatter):
    """Appends ` request_id=ID` to messages that are logged while a call is answered."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        call = current_call()
        line = super().formatMessage(record)
        return f"{line} request_id={call.id}" if call.id else line
