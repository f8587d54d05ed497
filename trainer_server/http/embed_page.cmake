# cmake -DOUTPUT=FILE -DPAGE=live_page.html -P embed_page.cmake: writes live_page_document.h's constant.
file(READ ${PAGE} text)
file(WRITE ${OUTPUT} "#include \"trainer_server/http/live_page_document.h\"\n
namespace tandem {\n
const std::string_view kLivePageDocument = R\"page(${text})page\";\n
}  // namespace tandem\n")
